// A chunk of keys of one row, and asking memory for it before it is read.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr int64_t kTurned = kLanes * kWide / 2;  // keys are turned and scored in multiples of it
constexpr int64_t kLine = 64;                    // bytes that come from memory at once

// Keys `low` .. `high` - 1 of a chunk.
struct Keys {
  int64_t low, high;
};

// One chunk of keys: offsets of its live tokens, `low` .. `high` - 1, in a pool, and its position.
// An offset is that of the first head of a job.
struct Chunk {
  int64_t base, low, high;
  int64_t offsets[kChunk];
  int64_t first_turned() const { return low / kTurned * kTurned; }
};

// Position of the oldest key that any query of a job sees, and the chunk that it is in. Partitions
// begin with chunks that a window may hide wholly: those are passed over.
inline int64_t oldest_seen(const Attention& a, const AttentionJob& job) {
  const int64_t oldest = job.first_position - a.window + 1;
  return oldest > 0 ? oldest : 0;
}

inline int64_t first_seen(const Attention& a, const AttentionJob& job) {
  const int64_t index = oldest_seen(a, job) / kChunk;
  return index > job.first_chunk ? index : job.first_chunk;
}

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
  // What is turned reaches beyond the live keys: there it reads a live one, which is masked.
  const int64_t live = chunk.offsets[chunk.low];
  for (int64_t t = chunk.first_turned(); t < chunk.low; ++t) chunk.offsets[t] = live;
  for (int64_t t = chunk.high; t % kTurned; ++t) chunk.offsets[t] = live;
  return chunk;
}

// One pool's lines of a chunk, of the heads of a job: to be asked for in the order they lie in, as
// many at each of `steps` steps as makes it even. They go to the second level of cache: lines on
// their way to the first hold the few buffers there that reading needs.
class Ahead {
 public:
  Ahead() = default;  // nothing to ask for
  template <class T>
  Ahead(const T* pool, const Chunk& chunk, int64_t entries, int64_t steps)
      : pool_(reinterpret_cast<const char*>(pool)), offsets_(chunk.offsets), size_(sizeof(T)),
        bytes_(entries * size_), token_(chunk.low), end_(chunk.high) {
    const int64_t lines = (end_ - token_) * ((bytes_ + kLine - 1) / kLine);
    pace_ = (lines + steps - 1) / steps;
  }

  JAXPAGE_INLINE void ask() { ask_for(pace_); }
  void ask_rest() {
    while (token_ < end_) ask_for(kChunk);
  }

 private:
  JAXPAGE_INLINE void ask_for(int64_t lines) {
    for (; lines > 0 && token_ < end_; --lines) {
      __builtin_prefetch(pool_ + offsets_[token_] * size_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, ++token_;
    }
  }

  const char* pool_ = nullptr;
  const int64_t* offsets_ = nullptr;
  int64_t size_ = 0, bytes_ = 0;  // of an entry, and of a token
  int64_t token_ = 0, end_ = 0;   // the next to be asked for, and where to stop
  int64_t at_ = 0, pace_ = 0;     // bytes of that token asked for already, and lines a step
};

}  // namespace
