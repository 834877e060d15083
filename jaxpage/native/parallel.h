// A loop over jobs on the threads that XLA computes with.
#pragma once

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

// A place where a helper that has just finished stays for a moment: a step is a hundred and more
// calls within microseconds of each other, and waking a thread of the pool takes 30 to 90 of them.
// It goes back to the pool when nothing comes, so that no thread is kept from XLA or at exit.
class WaitingPlace {
 public:
  // Whether a helper was waiting here; it then runs `task`.
  bool post(const std::function<void()>& task) {
    int expected = kWaiting;
    if (!state_.compare_exchange_strong(expected, kTaken)) return false;
    task_ = task;
    state_.store(kPosted);
    return true;
  }

  // Runs what is posted here, until nothing is for kPatience.
  void serve() {
    int expected = kNobody;
    while (state_.compare_exchange_strong(expected, kWaiting)) {
      if (!wait()) return;
      const std::function<void()> task = std::move(task_);
      state_.store(kNobody);
      task();
      expected = kNobody;
    }
  }

 private:
  enum { kNobody, kWaiting, kTaken, kPosted };
  static constexpr std::chrono::microseconds kPatience{100};

  bool wait() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    for (int turn = 1;; ++turn) {
      if (state_.load() == kPosted) return true;
      pause();
      if (turn % 32 || std::chrono::steady_clock::now() < end) continue;
      int expected = kWaiting;
      if (state_.compare_exchange_strong(expected, kNobody)) return false;
    }
  }

  std::atomic<int> state_{kNobody};
  std::function<void()> task_;
};

// Of worker 1, 2, ...; never destroyed, since a helper may outlive static objects.
constexpr int64_t kMostWorkers = 64;
inline WaitingPlace& waiting_place(int64_t worker) {
  static auto* const places = new WaitingPlace[kMostWorkers];
  return places[worker];
}

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
    if (waiting_place(worker).post(task)) continue;
    pool.Schedule([task, worker] {
      task();
      waiting_place(worker).serve();
    });
  }
  jobs->run(0, work);
  jobs->wait();
}

}  // namespace jaxpage
