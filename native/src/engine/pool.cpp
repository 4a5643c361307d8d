#include "engine/pool.h"

namespace w4conv {
namespace {

// Spin for some tens of microseconds, as the next job of a forward pass comes that soon; then sleep.
constexpr int kSpins = 20000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Pool::Pool(int n_threads) {
  for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { worker(i); });
}

Pool::~Pool() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void Pool::work(int thread) {
  for (int64_t i = next_.fetch_add(1); i < n_tasks_; i = next_.fetch_add(1)) job_.call(job_.context, i, thread);
}

void Pool::run_job(Job job, int64_t n_tasks) {
  const std::lock_guard<std::mutex> turn(turn_);
  job_ = job;
  n_tasks_ = n_tasks;
  next_ = 0;
  open_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  work(0);
  open_ = false;
  for (int spins = 0; joined_ != 0; spins++) spins < kSpins ? pause() : std::this_thread::yield();
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (!stop_) {
    uint32_t now = generation_;
    for (int spins = 0; now == seen; spins++) {
      spins < kSpins ? pause() : generation_.wait(seen);
      now = generation_;
    }
    seen = now;
    joined_.fetch_add(1);
    if (open_) work(thread);
    joined_.fetch_sub(1);
  }
}

}  // namespace w4conv
