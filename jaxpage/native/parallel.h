// A loop over jobs on the threads that XLA computes with.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxpage {

// Calls work(job, worker) for every job, worker < num_workers(pool), and returns when all have
// ended. The calling thread takes jobs too and waits only for jobs that another thread has begun:
// a pool of one busy thread, or none, cannot hold it up. A helper that comes too late finds no
// job and touches nothing but the counters, which it owns a share of.
inline int64_t num_workers(const xla::ffi::ThreadPool& pool) {
  const int64_t threads = pool.num_threads();
  return threads < 1 ? 1 : threads;
}

template <class Work>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_jobs, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  const int64_t workers = num_jobs < num_workers(pool) ? num_jobs : num_workers(pool);
  if (workers <= 1) {
    for (int64_t job = 0; job < num_jobs; ++job) work(job, 0);
    return;
  }
  auto shared = std::make_shared<Shared>();
  auto take_jobs = [shared, num_jobs, work = &work](int64_t worker) {
    for (int64_t job; (job = shared->next.fetch_add(1)) < num_jobs;) {
      (*work)(job, worker);
      if (shared->done.fetch_add(1) + 1 == num_jobs) {
        std::lock_guard<std::mutex> lock(shared->mutex);
        shared->all_done.notify_one();
      }
    }
  };
  for (int64_t worker = 1; worker < workers; ++worker) {
    pool.Schedule([take_jobs, worker] { take_jobs(worker); });
  }
  take_jobs(0);
  for (int spin = 0; spin < 20000; ++spin) {  // the last jobs end within microseconds
    if (shared->done.load() == num_jobs) return;
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == num_jobs; });
}

}  // namespace jaxpage
