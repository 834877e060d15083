// The online softmax of a job's query vectors over the keys that were read so far.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr float kMasked = -1e30f;  // score of a key that is not seen: -inf minus -inf would be NaN
// Largest score of no keys: far enough above kMasked that masked keys weigh exactly 0.
constexpr float kNothing = kMasked / 2;

// Pointers into the array that kernels.h calls a state.
struct State {
  float* acc;  // [vectors, padded H] weighted sums of V
  float* max;  // [vectors] largest scores
  float* sum;  // [vectors] sums of weights, exp(score - max)
  State(float* at, int64_t vectors, int64_t padded)
      : acc(at), max(at + vectors * padded), sum(max + vectors) {}
  // Leaves out the first `count` vectors.
  void skip(int64_t count, int64_t padded) {
    acc += count * padded, max += count, sum += count;
  }
};

inline void clear(State state, int64_t vectors, int64_t padded) {
  for (int64_t i = 0; i < vectors * padded; ++i) state.acc[i] = 0;
  for (int64_t i = 0; i < vectors; ++i) state.max[i] = kNothing, state.sum[i] = 0;
}

// Adds `more` to `state`, whose keys come before those of `more`.
inline void merge_states(State state, State more, int64_t vectors, int64_t padded) {
  for (int64_t v = 0; v < vectors; ++v) {
    const float max = more.max[v] > state.max[v] ? more.max[v] : state.max[v];
    const float rescale = exp_negative(splat(state.max[v] - max))[0];
    const float weight = exp_negative(splat(more.max[v] - max))[0];
    for (int64_t i = v * padded; i < (v + 1) * padded; i += kLanes) {
      const Vec added = load(more.acc + i) * weight;
      store(state.acc + i, multiply_add(load(state.acc + i), splat(rescale), added));
    }
    state.max[v] = max;
    state.sum[v] = multiply_add(state.sum[v], rescale, more.sum[v] * weight);
  }
}

}  // namespace
