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
constexpr int64_t kTurned = kLanes * kWide / 2;  // keys that are turned, and scored, at a time

// One chunk of keys: offsets of its live tokens, `low` .. `high` - 1, in a pool, and its position.
struct Chunk {
  int64_t base, low, high;
  int64_t offsets[kChunk];
  int64_t first() const { return low / kTurned * kTurned; }
};

JAXPAGE_INLINE Chunk locate(const Attention& a, const AttentionJob& job, int64_t base,
                            int64_t start, int64_t end) {
  Chunk chunk;
  chunk.base = base;
  chunk.low = start > base ? start - base : 0;
  chunk.high = end - base < kChunk ? end - base : kChunk;
  const int32_t* table = a.block_tables + job.row * a.table_width;
  int64_t index = (base + chunk.low) / a.block_size, inside = (base + chunk.low) % a.block_size;
  int64_t block = 0;
  for (int64_t t = chunk.low; t < chunk.high; ++t) {
    if (t == chunk.low || inside == 0) {
      block = table[index];
      block = block < 0 ? 0 : block >= a.num_blocks ? a.num_blocks - 1 : block;
    }
    const int64_t slot = block * a.block_size + inside;
    chunk.offsets[t] = (slot * a.num_kv_heads + job.kv_head) * a.head_dim;
    if (++inside == a.block_size) inside = 0, ++index;
  }
  // What is turned reaches beyond the live keys: there it reads a live one, which is masked.
  const int64_t live = chunk.offsets[chunk.low];
  for (int64_t t = chunk.first(); t < chunk.low; ++t) chunk.offsets[t] = live;
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

// kLanes keys as columns, to[entry of the head * kChunk + key].
template <class T>
JAXPAGE_INLINE void turn_tile(const T* const* keys, int64_t head_dim, float* to) {
  Vec rows[kLanes];
  auto turn = [&](int64_t d) {
    transpose(rows);
    for (int i = 0; i < kLanes; ++i) store(to + (d + i) * kChunk, rows[i]);
  };
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load(keys[i] + d);
    turn(d);
  }
  if (const int part = static_cast<int>(head_dim - d)) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load_part(keys[i] + d, part);
    turn(d);
  }
}

// The chunk's keys as columns; meanwhile asks for its values.
template <class T>
JAXPAGE_INLINE void turn_keys(const Attention& a, const Chunk& chunk, float* turned) {
  for (int64_t t = chunk.first(); t < chunk.high || t % kTurned; t += kLanes) {
    const T* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = static_cast<const T*>(a.k_pool) + chunk.offsets[t + i];
      ask<T>(a.v_pool, chunk.offsets[t + i], a.head_dim);
    }
    turn_tile(keys, a.head_dim, turned + t);
  }
}

template <int kUsed, int kVecs>
JAXPAGE_INLINE void score_tile(const Attention& a, const float* turned, const float* q,
                               float* scores) {
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs] = {};
  for (int64_t d = 0; d < a.head_dim; ++d) {
    Vec keys[kVecs];
    for (int i = 0; i < kVecs; ++i) keys[i] = load(turned + d * kChunk + i * kLanes);
    for (int c = 0; c < kUsed; ++c) {
      const float query = q[c * padded + d];
      for (int i = 0; i < kVecs; ++i) sums[c][i] += keys[i] * query;
    }
  }
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(scores + c * kChunk + i * kLanes, sums[c][i]);
  }
}

// scores[query vector][key] of the keys that were turned.
template <int kUsed>
JAXPAGE_INLINE void score(const Attention& a, const Chunk& chunk, const float* turned,
                          const float* q, float* scores) {
  int64_t t = chunk.first();
  for (; t + kLanes * kWide <= chunk.high; t += kLanes * kWide) {
    score_tile<kUsed, kWide>(a, turned + t, q, scores + t);
  }
  for (; t < chunk.high; t += kTurned) {
    score_tile<kUsed, kWide / 2>(a, turned + t, q, scores + t);
  }
}

// Masks the keys of one query vector outside `low` .. `high` - 1.
JAXPAGE_INLINE void mask(float* scores, int64_t low, int64_t high) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int i = 0; i < kChunk; i += kLanes) {
    const Ints key = lane + i;
    const Ints seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
    store(scores + i, seen ? load(scores + i) : splat(kMasked));
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
    tops[c] = raised[c] = spread_max(best)[0];
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
    totals[c] = totals[c] * fades[c] + spread_sum(sum)[0];
  }
}

}  // namespace
