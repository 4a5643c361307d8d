#include "ops/pool.h"

#include <pthread.h>

#include <string>
#include <system_error>
#include <utility>

namespace w4conv {
namespace {

// Spin for some tens of microseconds, as the next job of a forward pass comes that soon; then sleep.
constexpr int kSpins = 20000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

std::atomic<int> forks{0};
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { forks++; });

}  // namespace

int n_forks() { return forks.load(std::memory_order_relaxed); }

Pool::Pool(int n_threads) : n_threads_(n_threads), team_(std::make_unique<Team>(n_threads)) {}

Pool::~Pool() {
  if (forks_ != n_forks()) (void)team_.release();  // its threads are the parent's: nobody to join
}

Pool::Team& Pool::team() {
  if (forks_ != n_forks()) {
    (void)team_.release();
    team_ = std::make_unique<Team>(n_threads_);
    forks_ = n_forks();
  }
  return *team_;
}

Pool::Team::Team(int n_threads) {
  try {
    workers_.reserve(static_cast<size_t>(n_threads - 1));
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error& error) {
    const size_t n_started = workers_.size() + 1;
    stop();
    throw ThreadStartError("the system starts no more than " + std::to_string(n_started) + " of " +
                           std::to_string(n_threads) + " threads: " + error.code().message());
  } catch (...) {
    stop();
    throw;
  }
}

void Pool::Team::stop() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void Pool::Team::work(int thread) {
  try {
    for (int64_t i = next_.fetch_add(1); i < n_tasks_; i = next_.fetch_add(1)) job_.call(job_.context, i, thread);
  } catch (...) {
    if (!failed_.exchange(true)) failure_ = std::current_exception();
    next_ = n_tasks_;  // nobody takes up what is left
  }
}

void Pool::Team::run(Job job, int64_t n_tasks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  job_ = job;
  n_tasks_ = n_tasks;
  next_ = 0;
  open_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  work(0);
  open_ = false;
  for (int spins = 0; joined_ != 0; spins++) spins < kSpins ? pause() : std::this_thread::yield();
  if (failed_) {
    failed_ = false;
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void Pool::Team::worker(int thread) {
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
