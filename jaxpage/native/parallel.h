// A loop over jobs on the threads that XLA computes with.
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

// Where the calling thread runs; -1 where that is not known.
inline int this_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves the calling thread off a processor, where it may run on another, and leaves it as free to
// run anywhere as it was.
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

// Where a helper finds what to do, and stays for a moment once it is done: a step is a hundred and
// more calls within microseconds of each other, and waking a thread of the pool takes 30 to 90 of
// them. It goes back to the pool when nothing comes, so that no thread is kept from XLA or at exit.
class HelperPlace {
 public:
  // Leaves `task` for the helper, who is called from the pool unless one is here or on its way. It
  // may still be at the end of the task before: waiting for it here, or calling another thread,
  // would leave the caller to work alone. What was left and not yet taken up is replaced.
  void leave(xla::ffi::ThreadPool& pool, const std::function<void()>& task) {
    const int found = state_.exchange(kHeld);
    if (found == kHeld) return;  // by another caller, or by the helper
    task_ = task;
    caller_ = this_processor();
    state_.store(found == kHere || found == kLeft ? kLeft : kCalled);
    if (found == kNobody) pool.Schedule([this] { serve(); });
  }

 private:
  // kHeld: one thread is writing or reading task_. kLeft: it is for a helper who is here.
  enum { kNobody, kCalled, kHere, kLeft, kHeld };
  static constexpr std::chrono::microseconds kPatience{50};

  // Runs what is left here, until nothing is for kPatience.
  void serve() {
    do {
      while (state_.exchange(kHeld) == kHeld) pause();
      const std::function<void()> task = std::move(task_);
      const int caller = caller_;
      state_.store(kHere);
      // The system may have woken it on the caller's processor, and would leave both there while
      // another one is idle: each runs when the other waits.
      if (caller >= 0 && caller == this_processor()) leave_processor(caller);
      task();
    } while (wait());
  }

  bool wait() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (int turn = 1;; ++turn) {
      if (state_.load() == kLeft) return true;
      pause();
      if (turn % 32 || std::chrono::steady_clock::now() < end) continue;
      int expected = kHere;
      if (state_.compare_exchange_strong(expected, kNobody)) return false;
    }
  }

  std::atomic<int> state_{kNobody};
  std::function<void()> task_;
  int caller_ = -1;
};

// Of worker 1, 2, ... up to kMostWorkers.
constexpr int64_t kMostWorkers = 64;
HelperPlace& helper_place(int64_t worker);

// The jobs of one call: each worker has a run of them, and takes from the end of the others' once
// its own is done.
class Jobs {
 public:
  Jobs(int64_t count, int64_t workers)
      : count_(count), workers_(workers), runs_(new std::atomic<uint64_t>[workers]) {
    for (int64_t w = 0; w < workers; ++w) {
      runs_[w] = pack(count * w / workers, count * (w + 1) / workers);
    }
  }

  // Calls work(job, worker, is_next_mine) until no job is left. `is_next_mine`: job + 1 comes next
  // unless another worker takes it first.
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

// Calls work(job, worker, is_next_mine) for every job, worker < num_workers(pool), and returns when
// all have ended. The calling thread takes jobs too and waits only for jobs that another thread has
// begun: a pool of one busy thread, or none, cannot hold it up. A helper that comes too late finds
// no job and touches nothing but the counters, which it owns a share of.
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
