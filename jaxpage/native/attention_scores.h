// A chunk of keys against query vectors: from the pool to weights. Lanes are keys: a chunk's keys
// are turned to columns once for all query vectors of a job, and a score is one sum over the head
// in order, without sums over lanes. So it is the same to the bit in any tile.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr float kMasked = -1e30f;  // -inf minus -inf would be NaN
constexpr float kNothing = kMasked / 2;  // top score of no keys: masked keys weigh 0 beside it
constexpr int64_t kTurned = kLanes * kWide / 2;  // keys are turned and scored in multiples of it

// Keys `low` .. `high` - 1 of a chunk.
struct Keys {
  int64_t low, high;
};

// One chunk of keys: offsets of its live tokens, `low` .. `high` - 1, in a pool, and its position.
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

// Asks memory for a head of one token in a pool.
template <class T>
JAXPAGE_INLINE void ask(const void* pool, int64_t offset, int64_t head_dim) {
  const char* from = reinterpret_cast<const char*>(static_cast<const T*>(pool) + offset);
  const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}

// The keys of `ahead` that were not asked for beside those of `asked`.
template <class T>
JAXPAGE_INLINE void ask_rest(const Attention& a, Keys asked, const Chunk& ahead) {
  for (int64_t t = ahead.low; t < ahead.high; ++t) {
    if (t < asked.low || t >= asked.high) ask<T>(a.k_pool, ahead.offsets[t], a.head_dim);
  }
}

// Calls use(d, columns, count) for entries d .. d + count - 1 of the head, in order: lane i of a
// column is key `first` + i of the chunk. Meanwhile asks for the values of those keys.
template <class T, class Use>
JAXPAGE_INLINE void for_columns(const Attention& a, const Chunk& chunk, int64_t first, Use use) {
  const T* pool = static_cast<const T*>(a.k_pool);
  const T* values = static_cast<const T*>(a.v_pool);
  const int64_t* offsets = chunk.offsets + first;
  Vec rows[kLanes];
  int64_t d = 0;
  for (; d + kLanes <= a.head_dim; d += kLanes) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load(pool + offsets[i] + d);
    for (int i = 0; i < kLanes; ++i) __builtin_prefetch(values + offsets[i] + d, 0, 3);
    transpose(rows);
    use(d, rows, kLanes);
  }
  if (const int part = static_cast<int>(a.head_dim - d)) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load_part(pool + offsets[i] + d, part);
    transpose(rows);
    use(d, rows, part);
  }
}

// The chunk's keys as columns, turned[entry of the head][key].
template <class T>
JAXPAGE_INLINE void turn_keys(const Attention& a, const Chunk& chunk, float* turned) {
  for (int64_t t = chunk.first_turned(); t < chunk.high || t % kTurned; t += kLanes) {
    for_columns<T>(a, chunk, t, [&](int64_t d, const Vec* columns, int count) {
#pragma GCC unroll 16  // columns stay in registers
      for (int i = 0; i < count; ++i) store(turned + (d + i) * kChunk + t, columns[i]);
    });
  }
}

// Few query vectors: scores from the columns while they are in registers.
template <int kUsed, class T>
JAXPAGE_INLINE void score_few(const Attention& a, const Chunk& chunk, Keys seen,
                              const float* q, float* scores) {
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t t = seen.low / kLanes * kLanes; t < seen.high; t += kLanes) {
    Vec sums[kUsed] = {};
    for_columns<T>(a, chunk, t, [&](int64_t d, const Vec* columns, int count) {
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) {
        for (int c = 0; c < kUsed; ++c) sums[c] += columns[i] * q[c * padded + d + i];
      }
    });
    for (int c = 0; c < kUsed; ++c) store(scores + c * kChunk + t, sums[c]);
  }
}

template <int kUsed, int kVecs>
JAXPAGE_INLINE void score_tile(const Attention& a, const float* turned, const float* q,
                               float* scores) {
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs] = {};
  int64_t d = 0;
  do {  // at least once: a loop that may be passed by would keep the sums in memory
    Vec keys[kVecs];
    for (int i = 0; i < kVecs; ++i) keys[i] = load(turned + d * kChunk + i * kLanes);
    for (int c = 0; c < kUsed; ++c) {
      const float query = q[c * padded + d];
      for (int i = 0; i < kVecs; ++i) sums[c][i] += keys[i] * query;
    }
  } while (++d < a.head_dim);
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(scores + c * kChunk + i * kLanes, sums[c][i]);
  }
}

// Many: scores[query vector][key] of the keys that were turned.
template <int kUsed>
JAXPAGE_INLINE void score_many(const Attention& a, Keys seen, const float* turned,
                               const float* q, float* scores) {
  int64_t t = seen.low / kTurned * kTurned;
  for (; t + kLanes * kWide <= kChunk && t + kTurned < seen.high; t += kLanes * kWide) {
    score_tile<kUsed, kWide>(a, turned + t, q, scores + t);
  }
  for (; t < seen.high; t += kTurned) {
    score_tile<kUsed, kWide / 2>(a, turned + t, q, scores + t);
  }
}

// Masks the keys that one query vector does not see.
JAXPAGE_INLINE void mask(float* scores, Keys seen) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const auto low = static_cast<int32_t>(seen.low), high = static_cast<int32_t>(seen.high);
  for (int i = 0; i < kChunk; i += kLanes) {
    const Ints key = lane + i;
    store(scores + i, (key >= low) & (key < high) ? load(scores + i) : splat(kMasked));
  }
}

// Scores to weights, and the factors by which what was summed so far fades, since the largest
// scores have moved.
template <int kUsed>
JAXPAGE_INLINE void weigh(float* scores, float* tops, float* totals, float* fades) {
  constexpr int kSome = (kUsed + kLanes - 1) / kLanes * kLanes;
  float before[kSome] = {}, raised[kSome] = {}, faded[kSome];
  for (int c = 0; c < kUsed; ++c) {
    Vec best = splat(tops[c]);
    for (int i = 0; i < kChunk; i += kLanes) best = larger(load(scores + c * kChunk + i), best);
    before[c] = tops[c];
    tops[c] = raised[c] = max_of(best);
  }
  for (int i = 0; i < kSome; i += kLanes) {
    store(faded + i, exp_negative(load(before + i) - load(raised + i)));
  }
  for (int c = 0; c < kUsed; ++c) {
    Vec sum = Vec{};
    for (int i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      const Vec weight = exp_negative(load(scores + i) - splat(raised[c]));
      sum += weight;
      store(scores + i, weight);
    }
    fades[c] = faded[c];
    totals[c] = totals[c] * fades[c] + sum_of(sum);
  }
}

}  // namespace
