// A persistent pool of threads. run(n, f) calls f(task, thread) for tasks 0..n-1, claimed in order; the caller works too.
// Callers on several threads take turns. The first exception of a task ends the job and comes out of run.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace w4conv {

// The system starts no more threads.
struct ThreadStartError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// How often this process is a fork of one that had this library loaded: threads and held locks of the parent are not here.
int n_forks();

class Pool {
 public:
  // Raises ThreadStartError; threads that did start have ended then.
  explicit Pool(int n_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int n_threads() const { return n_threads_; }

  template <class F>
  void run(int64_t n_tasks, const F& f) {
    if (n_tasks <= 1 || n_threads_ == 1) {
      for (int64_t i = 0; i < n_tasks; i++) f(i, 0);
      return;
    }
    team().run({[](const void* context, int64_t task, int thread) { (*static_cast<const F*>(context))(task, thread); }, &f},
               n_tasks);
  }

 private:
  struct Job {
    void (*call)(const void* context, int64_t task, int thread) = nullptr;
    const void* context = nullptr;
  };
  class Team {
   public:
    explicit Team(int n_threads);
    ~Team() { stop(); }
    void run(Job job, int64_t n_tasks);

   private:
    void stop();
    void work(int thread);
    void worker(int thread);

    std::mutex mutex_;
    Job job_;  // read by workers only between joining an open job and leaving it
    int64_t n_tasks_ = 0;
    std::atomic<int64_t> next_{0};
    std::atomic<bool> open_{false};        // a job may be joined
    std::atomic<int> joined_{0};           // workers inside; a worker that is late is not waited for
    std::atomic<uint32_t> generation_{0};  // counts the jobs
    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::exception_ptr failure_;  // of the first task that threw
    std::vector<std::thread> workers_;
  };
  Team& team();  // a new one in a fork of the process

  const int n_threads_;
  int forks_ = n_forks();
  std::unique_ptr<Team> team_;
};

}  // namespace w4conv
