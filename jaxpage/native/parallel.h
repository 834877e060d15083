// parallel_for: a loop over jobs on the threads that XLA computes with.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace jaxpage {

inline int64_t num_workers(const xla::ffi::ThreadPool& pool) {
  const int64_t threads = pool.num_threads();
  return threads < 1 ? 1 : threads;
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The number of the processor that the calling thread runs on; -1 where that is not known.
inline int this_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread to another processor, if it may run on another; afterwards it may run on
// the same processors as before.
inline void leave_processor(int processor) {
#if defined(__linux__)
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(processor, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) {
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
#endif
}

// Where one helper, a thread of XLA's pool, takes its tasks from. It stays here for kPatience after
// a task: a step makes a hundred and more calls, microseconds apart, and to wake a thread of the
// pool takes 30 to 90 us. Then it goes back to the pool, so that neither XLA nor the end of the
// process has to wait for it.
class HelperPlace {
 public:
  // Leaves `task` for the helper, and calls one from the pool unless it is here or on its way. The
  // helper may still be ending the task before, and takes this one next: to wait for it, or to call
  // another thread, would leave the caller to work alone. A task that was left before and not taken
  // yet is replaced; its caller does without this helper.
  void leave(xla::ffi::ThreadPool& pool, const std::function<void()>& task) {
    const int found = state_.exchange(kHeld);
    if (found == kHeld) return;  // by another caller, or by the helper: do without it
    task_ = task;
    caller_ = this_processor();
    state_.store(found == kHere || found == kLeft ? kLeft : kCalled);
    if (found == kEmpty) pool.Schedule([this] { serve(); });
  }

 private:
  // kEmpty: no helper is here. kCalled: one is on its way from the pool, to take task_. kHere: it
  // is here, at work or waiting. kLeft: it is here, and task_ is its next. kHeld: a thread is
  // reading or writing task_.
  enum { kEmpty, kCalled, kHere, kLeft, kHeld };
  static constexpr std::chrono::microseconds kPatience{50};

  // The helper: runs the tasks that are left here, until none is for kPatience.
  void serve() {
    do {
      while (state_.exchange(kHeld) == kHeld) pause();
      const std::function<void()> task = std::move(task_);
      const int caller = caller_;
      state_.store(kHere);
      // The system may have woken this thread on the caller's processor, and would let the two take
      // turns there while another processor is idle.
      if (caller >= 0 && caller == this_processor()) leave_processor(caller);
      task();
    } while (wait());
  }

  // Whether another task came within kPatience.
  bool wait() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (int spin = 1;; ++spin) {
      if (state_.load() == kLeft) return true;
      pause();
      if (spin % 32 || std::chrono::steady_clock::now() < end) continue;
      int expected = kHere;
      if (state_.compare_exchange_strong(expected, kEmpty)) return false;
    }
  }

  std::atomic<int> state_{kEmpty};
  std::function<void()> task_;
  int caller_ = -1;
};

constexpr int64_t kMostWorkers = 64;
// The place of the helper that is worker 1, 2, ... kMostWorkers - 1; worker 0 is the caller.
HelperPlace& helper_place(int64_t worker);

// The jobs of one call. Each worker has a run of them, first .. last - 1, and takes jobs from its
// beginning; once its own run is done it takes jobs from the ends of the others'.
class Jobs {
 public:
  Jobs(int64_t count, int64_t workers)
      : count_(count), workers_(workers), runs_(new std::atomic<uint64_t>[workers]) {
    for (int64_t w = 0; w < workers; ++w) {
      runs_[w] = pack(count * w / workers, count * (w + 1) / workers);
    }
  }

  // Calls work(job, worker, is_next_mine) until no job is left. is_next_mine: this worker does
  // job + 1 next, unless another one takes it first.
  template <class Work>
  void run(int64_t worker, const Work& work) {
    for (int64_t i = 0; i < workers_; ++i) {
      const int64_t victim = (worker + i) % workers_;
      for (uint64_t run = runs_[victim].load(); first(run) < last(run);) {
        const bool is_own = i == 0;
        const uint64_t left = is_own ? pack(first(run) + 1, last(run))
                                     : pack(first(run), last(run) - 1);
        if (!runs_[victim].compare_exchange_weak(run, left)) continue;
        work(is_own ? first(run) : last(run) - 1, worker, is_own && first(left) < last(left));
        finish();
        run = runs_[victim].load();
      }
    }
  }

  // Returns when all jobs are done.
  void wait() {
    for (int spin = 0; spin < 2000; ++spin) {  // the last jobs end within microseconds
      if (done_.load() == count_) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_.load() == count_; });
  }

 private:
  static uint64_t pack(int64_t first, int64_t last) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last);
  }
  static int64_t first(uint64_t run) { return static_cast<int64_t>(run >> 32); }
  static int64_t last(uint64_t run) { return static_cast<int64_t>(run & 0xffffffffu); }

  void finish() {
    if (done_.fetch_add(1) + 1 == count_) {
      std::lock_guard<std::mutex> lock(mutex_);
      all_done_.notify_one();
    }
  }

  const int64_t count_, workers_;
  const std::unique_ptr<std::atomic<uint64_t>[]> runs_;
  std::atomic<int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
};

// Calls work(job, worker, is_next_mine) for each job, with worker < num_workers(pool), and returns
// when all jobs are done. The calling thread takes jobs too and waits only for those that another
// thread has started: a pool whose threads are all busy, or that has none, cannot hold it up. A
// helper that comes too late finds no job and touches the counters alone, of which it owns a share.
template <class Work>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_jobs, const Work& work) {
  int64_t workers = num_jobs < num_workers(pool) ? num_jobs : num_workers(pool);
  if (workers > kMostWorkers) workers = kMostWorkers;
  if (workers <= 1) {
    for (int64_t job = 0; job < num_jobs; ++job) work(job, 0, job + 1 < num_jobs);
    return;
  }
  const auto jobs = std::make_shared<Jobs>(num_jobs, workers);
  for (int64_t worker = 1; worker < workers; ++worker) {
    const std::function<void()> task = [jobs, worker, work = &work] { jobs->run(worker, *work); };
    helper_place(worker).leave(pool, task);
  }
  jobs->run(0, work);
  jobs->wait();
}

}  // namespace jaxpage
