// Online softmaxes of query vectors: what was summed of the keys so far.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr float kMasked = -1e30f;  // -inf minus -inf would be NaN
constexpr float kNothing = kMasked / 2;  // top score of no keys: masked keys weigh 0 beside it

struct State {
  float* acc;    // [vectors, padded H]
  float* top;    // [vectors]
  float* total;  // [vectors]
  State(float* at, int64_t vectors, int64_t padded)
      : acc(at), top(at + vectors * padded), total(top + vectors) {}
  // That of vectors `first` and on.
  void skip(int64_t first, int64_t padded) {
    acc += first * padded, top += first, total += first;
  }
};

inline void clear(State state, int64_t vectors, int64_t padded) {
  for (int64_t i = 0; i < vectors * padded; ++i) state.acc[i] = 0;
  for (int64_t i = 0; i < vectors; ++i) state.top[i] = kNothing, state.total[i] = 0;
}

// Adds `more` to `state`, which comes before it.
inline void merge_states(State state, State more, int64_t vectors, int64_t padded) {
  for (int64_t v = 0; v < vectors; ++v) {
    const float top = more.top[v] > state.top[v] ? more.top[v] : state.top[v];
    const float fade = exp_negative(splat(state.top[v] - top))[0];
    const float weight = exp_negative(splat(more.top[v] - top))[0];
    for (int64_t i = v * padded; i < (v + 1) * padded; i += kLanes) {
      const Vec added = load(more.acc + i) * weight;
      store(state.acc + i, multiply_add(load(state.acc + i), splat(fade), added));
    }
    state.top[v] = top;
    state.total[v] = multiply_add(state.total[v], fade, more.total[v] * weight);
  }
}

}  // namespace
