// A persistent pool of threads. run(n, f) calls f(task, thread) for tasks 0..n-1, claimed in order; the caller works too.
// Callers on several threads take turns.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace w4conv {

class Pool {
 public:
  explicit Pool(int n_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int n_threads() const { return static_cast<int>(workers_.size()) + 1; }

  template <class F>
  void run(int64_t n_tasks, const F& f) {
    if (n_tasks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < n_tasks; i++) f(i, 0);
      return;
    }
    run_job({[](const void* context, int64_t task, int thread) { (*static_cast<const F*>(context))(task, thread); }, &f},
            n_tasks);
  }

 private:
  struct Job {
    void (*call)(const void* context, int64_t task, int thread) = nullptr;
    const void* context = nullptr;
  };
  void run_job(Job job, int64_t n_tasks);
  void work(int thread);
  void worker(int thread);

  std::mutex turn_;
  Job job_;  // read by workers only between joining an open job and leaving it
  int64_t n_tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> open_{false};        // a job may be joined
  std::atomic<int> joined_{0};           // workers inside; a worker that is late is not waited for
  std::atomic<uint32_t> generation_{0};  // counts the jobs
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace w4conv
