// Scores of query vectors against a chunk of keys, and their weights. Each lane of a vector is one
// key: keys are transposed first, so that a score is added up over the head's entries in order, in
// one lane, and is the same to the bit in any tile.
#pragma once

#include "attention_chunk.h"
#include "attention_state.h"

namespace {

using namespace jaxpage;

// Transposes kLanes keys: calls use(d, columns, count) for entries d .. d + count - 1 of the head,
// in order. Lane i of column j is entry d + j of the key at offsets[i]. Prefetches meanwhile.
template <class T, class Use>
JAXPAGE_INLINE void for_columns(int64_t head_dim, const T* keys, const int64_t* offsets,
                                Prefetcher& prefetcher, Use use) {
  Vec rows[kLanes];
  Prefetcher local = prefetcher;  // a copy stays in registers
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load(keys + offsets[i] + d);
    local.step();
    transpose(rows);
    use(d, rows, kLanes);
  }
  prefetcher = local;
  if (const int part = static_cast<int>(head_dim - d)) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load_part(keys + offsets[i] + d, part);
    transpose(rows);
    use(d, rows, part);
  }
}

// The chunk's keys of one head as transposed[entry of the head][key], [H, kChunk].
template <class T>
JAXPAGE_INLINE void transpose_keys(const Attention& a, const Chunk& chunk, const T* keys,
                                   Prefetcher& prefetcher, float* transposed) {
  for (int64_t t = chunk.first_transposed(); t < chunk.high || t % kTransposed; t += kLanes) {
    const auto keep = [&](int64_t d, const Vec* columns, int count) {
#pragma GCC unroll 16  // columns stay in registers
      for (int i = 0; i < count; ++i) store(transposed + (d + i) * kChunk + t, columns[i]);
    };
    for_columns(a.head_dim, keys, chunk.offsets + t, prefetcher, keep);
  }
}

// scores[query vector][key] for a tile that is the only one of its job and head: each transposed
// column is used while it is in a register.
template <int kUsed, class T>
JAXPAGE_INLINE void score_few(const Attention& a, const Chunk& chunk, Keys seen, const T* keys,
                              Prefetcher& prefetcher, const float* q, float* scores) {
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t t = seen.low / kLanes * kLanes; t < seen.high; t += kLanes) {
    Vec sums[kUsed] = {};
    const auto multiply = [&](int64_t d, const Vec* columns, int count) {
#pragma GCC unroll 16
      for (int i = 0; i < count; ++i) {
        for (int c = 0; c < kUsed; ++c) {
          sums[c] = multiply_add(columns[i], splat(q[c * padded + d + i]), sums[c]);
        }
      }
    };
    for_columns(a.head_dim, keys, chunk.offsets + t, prefetcher, multiply);
    for (int c = 0; c < kUsed; ++c) store(scores + c * kChunk + t, sums[c]);
  }
}

template <int kUsed, int kVecs>
JAXPAGE_INLINE void score_tile(const Attention& a, const float* transposed, const float* q,
                               float* scores) {
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs] = {};
  int64_t d = 0;
  do {  // at least once: a loop that may be passed by would keep the sums in memory
    Vec keys[kVecs];
    for (int i = 0; i < kVecs; ++i) keys[i] = load(transposed + d * kChunk + i * kLanes);
    for (int c = 0; c < kUsed; ++c) {
      const Vec query = splat(q[c * padded + d]);
      for (int i = 0; i < kVecs; ++i) sums[c][i] = multiply_add(keys[i], query, sums[c][i]);
    }
  } while (++d < a.head_dim);
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(scores + c * kChunk + i * kLanes, sums[c][i]);
  }
}

// scores[query vector][key] for one of several tiles, from the transposed keys.
template <int kUsed>
JAXPAGE_INLINE void score_many(const Attention& a, Keys seen, const float* transposed,
                               const float* q, float* scores) {
  int64_t t = seen.low / kTransposed * kTransposed;
  for (; t + kLanes * kWide <= kChunk && t + kTransposed < seen.high; t += kLanes * kWide) {
    score_tile<kUsed, kWide>(a, transposed + t, q, scores + t);
  }
  for (; t < seen.high; t += kTransposed) {
    score_tile<kUsed, kWide / 2>(a, transposed + t, q, scores + t);
  }
}

// Masks the scores of keys that one query vector does not see.
JAXPAGE_INLINE void mask(float* scores, Keys seen) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const auto low = static_cast<int32_t>(seen.low), high = static_cast<int32_t>(seen.high);
  for (int i = 0; i < kChunk; i += kLanes) {
    const Ints key = lane + i;
    store(scores + i, ((key >= low) & (key < high)) ? load(scores + i) : splat(kMasked));
  }
}

// Turns scores [kUsed, kChunk] into weights, and adds them to the states' max and sum. rescale
// [kUsed] gets the factors for what was summed before: exp(old max - new max).
template <int kUsed>
JAXPAGE_INLINE void weigh(float* scores, float* max, float* sum, float* rescale) {
  constexpr int kSome = (kUsed + kLanes - 1) / kLanes * kLanes;
  float before[kSome] = {}, after[kSome] = {}, factors[kSome];
  for (int c = 0; c < kUsed; ++c) {
    Vec best = splat(max[c]);
    for (int i = 0; i < kChunk; i += kLanes) best = larger(load(scores + c * kChunk + i), best);
    before[c] = max[c];
    max[c] = after[c] = max_of(best);
  }
  for (int i = 0; i < kSome; i += kLanes) {
    store(factors + i, exp_negative(load(before + i) - load(after + i)));
  }
  for (int c = 0; c < kUsed; ++c) {
    Vec added = Vec{};
    for (int i = c * kChunk; i < (c + 1) * kChunk; i += kLanes) {
      const Vec weight = exp_negative(load(scores + i) - splat(after[c]));
      added += weight;
      store(scores + i, weight);
    }
    rescale[c] = factors[c];
    sum[c] = multiply_add(sum[c], rescale[c], sum_of(added));
  }
}

}  // namespace
