// A chunk of keys of one row: where it lies in the pool, and prefetching it before it is read.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr int64_t kTransposed = kLanes * kWide / 2;  // keys are read in multiples of this many
constexpr int64_t kLine = 64;                        // bytes of a cache line

// Keys low .. high - 1 of a chunk, counted from its first.
struct Keys {
  int64_t low, high;
};

// One chunk of keys, of which low .. high - 1 are live: some query of the job sees them.
struct Chunk {
  int64_t base;             // position of its first key
  int64_t low, high;
  int64_t offsets[kChunk];  // where each token's first head of the job lies in a pool, in entries
  int64_t first_transposed() const { return low / kTransposed * kTransposed; }
};

// Position of the oldest key that any query of a job sees.
inline int64_t oldest_seen(const Attention& a, const AttentionJob& job) {
  const int64_t oldest = job.first_position - a.window + 1;
  return oldest > 0 ? oldest : 0;
}

// The first chunk to read. A job begins with a whole partition, whose first chunks a window may
// hide: they are passed over.
inline int64_t first_seen(const Attention& a, const AttentionJob& job) {
  const int64_t index = oldest_seen(a, job) / kChunk;
  return index > job.first_chunk ? index : job.first_chunk;
}

// Looks a chunk's tokens up in the row's block table. For a block beyond the pool it takes the
// nearest one.
inline Chunk locate(const Attention& a, const AttentionJob& job, int64_t index_of_chunk) {
  const int64_t start = oldest_seen(a, job), base = index_of_chunk * kChunk;
  const int64_t end = job.first_position + (job.is_prefix ? 0 : job.num_tokens);
  Chunk chunk;
  chunk.base = base;
  chunk.low = start > base ? start - base : 0;
  chunk.high = end - base < kChunk ? end - base : kChunk;
  const int32_t* table = a.block_tables + job.row * a.table_width;
  const int64_t first = base + chunk.low, stride = a.num_kv_heads * a.head_dim;
  int64_t index = first / a.block_size, inside = first % a.block_size;
  for (int64_t t = chunk.low; t < chunk.high; ++index, inside = 0) {
    const int64_t named = table[index], last = a.num_blocks - 1;
    const int64_t block = named < 0 ? 0 : named > last ? last : named;
    const int64_t left = a.block_size - inside, end = t + left < chunk.high ? t + left : chunk.high;
    int64_t offset = (block * a.block_size + inside) * stride + job.kv_head * a.head_dim;
    for (; t < end; ++t, offset += stride) chunk.offsets[t] = offset;
  }
  // Multiples of kTransposed are read: beside the live keys a live one again, which is masked.
  const int64_t live = chunk.offsets[chunk.low];
  for (int64_t t = chunk.first_transposed(); t < chunk.low; ++t) chunk.offsets[t] = live;
  for (int64_t t = chunk.high; t % kTransposed; ++t) chunk.offsets[t] = live;
  return chunk;
}

// Prefetches a chunk of one pool while something else is computed: `entries` numbers of each token,
// in the order of memory, as many cache lines at each of `steps` steps as spreads them evenly. They
// go to the second level of cache, because lines on their way to the first occupy the few buffers
// that reads need.
class Prefetcher {
 public:
  Prefetcher() = default;  // of nothing
  template <class T>
  Prefetcher(const T* pool, const Chunk& chunk, int64_t entries, int64_t steps)
      : pool_(reinterpret_cast<const char*>(pool)), offsets_(chunk.offsets), size_(sizeof(T)),
        bytes_(entries * size_), token_(chunk.low), end_(chunk.high) {
    const int64_t lines = (end_ - token_) * ((bytes_ + kLine - 1) / kLine);
    pace_ = (lines + steps - 1) / steps;
  }

  JAXPAGE_INLINE void step() { prefetch(pace_); }
  void finish() {
    while (token_ < end_) prefetch(kChunk);
  }

 private:
  JAXPAGE_INLINE void prefetch(int64_t lines) {
    for (; lines > 0 && token_ < end_; --lines) {
      __builtin_prefetch(pool_ + offsets_[token_] * size_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, ++token_;
    }
  }

  const char* pool_ = nullptr;
  const int64_t* offsets_ = nullptr;
  int64_t size_ = 0, bytes_ = 0;  // bytes of an entry, and of a token
  int64_t token_ = 0, end_ = 0;   // the next token to be prefetched, and where to stop
  int64_t at_ = 0, pace_ = 0;     // bytes of that token that were prefetched already, lines a step
};

}  // namespace
