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
  generation_.fetch_add(1, std::memory_order_release);
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
  busy_ = static_cast<int>(workers_.size());
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  work(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; spins++) {
    spins < kSpins ? pause() : std::this_thread::yield();
  }
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  while (true) {
    uint32_t now = generation_.load(std::memory_order_acquire);
    for (int spins = 0; now == seen; spins++) {
      spins < kSpins ? pause() : generation_.wait(seen, std::memory_order_acquire);
      now = generation_.load(std::memory_order_acquire);
    }
    seen = now;
    if (stop_) return;
    work(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace w4conv
