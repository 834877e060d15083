// A chunk of keys against query vectors: from the pool to weights. Lanes are keys: a chunk's keys
// are turned to columns once for all query vectors of a job, and a score is one sum over the head
// in order, without sums over lanes. So it is the same to the bit in any tile.
#pragma once

#include "attention_chunk.h"
#include "attention_state.h"

namespace {

using namespace jaxpage;

// Calls use(d, columns, count) for entries d .. d + count - 1 of the head, in order: lane i of a
// column is the key at offsets[i]. Asks for what is ahead meanwhile.
template <class T, class Use>
JAXPAGE_INLINE void for_columns(int64_t head_dim, const T* keys, const int64_t* offsets,
                                Ahead& ahead, Use use) {
  Vec rows[kLanes];
  Ahead asked = ahead;  // a copy stays in registers
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load(keys + offsets[i] + d);
    asked.ask();
    transpose(rows);
    use(d, rows, kLanes);
  }
  ahead = asked;
  if (const int part = static_cast<int>(head_dim - d)) {
    for (int i = 0; i < kLanes; ++i) rows[i] = load_part(keys + offsets[i] + d, part);
    transpose(rows);
    use(d, rows, part);
  }
}

// The chunk's keys as columns, turned[entry of the head][key].
template <class T>
JAXPAGE_INLINE void turn_keys(const Attention& a, const Chunk& chunk, const T* keys, Ahead& ahead,
                              float* turned) {
  for (int64_t t = chunk.first_turned(); t < chunk.high || t % kTurned; t += kLanes) {
    const auto keep = [&](int64_t d, const Vec* columns, int count) {
#pragma GCC unroll 16  // columns stay in registers
      for (int i = 0; i < count; ++i) store(turned + (d + i) * kChunk + t, columns[i]);
    };
    for_columns(a.head_dim, keys, chunk.offsets + t, ahead, keep);
  }
}

// Few query vectors: scores from the columns while they are in registers.
template <int kUsed, class T>
JAXPAGE_INLINE void score_few(const Attention& a, const Chunk& chunk, Keys seen, const T* keys,
                              Ahead& ahead, const float* q, float* scores) {
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
    for_columns(a.head_dim, keys, chunk.offsets + t, ahead, multiply);
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
      const Vec query = splat(q[c * padded + d]);
      for (int i = 0; i < kVecs; ++i) sums[c][i] = multiply_add(keys[i], query, sums[c][i]);
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
    store(scores + i, ((key >= low) & (key < high)) ? load(scores + i) : splat(kMasked));
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
    totals[c] = multiply_add(totals[c], fades[c], sum_of(sum));
  }
}

}  // namespace
