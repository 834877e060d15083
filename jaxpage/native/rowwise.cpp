// What is computed row by row between and after the matrix products: RMS norm, SwiGLU, rotary
// positions, and what sampling needs of logits. Each makes few passes over its numbers, and all
// threads share them; XLA makes more, on one thread.
#include <cmath>
#include <limits>

#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

// e / (1 + e) for x < 0 and 1 / (1 + e) for others, e = exp(-|x|): never an overflow.
JAXPAGE_INLINE Vec sigmoid(Vec x) {
  const Vec e = exp_negative(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

// The first kLanes entries, or the `left` that there are.
JAXPAGE_INLINE void store_any(float* to, Vec value, int64_t left) {
  if (left >= kLanes) return store(to, value);
  for (int64_t i = 0; i < left; ++i) to[i] = value[i];
}

constexpr float kNone = -std::numeric_limits<float>::infinity();  // largest of no numbers

// The largest of x, or NaN where one is among them.
float largest_of(const float* x, int64_t size) {
  Vec best = splat(kNone);
  Ints is_nan = Ints{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec part = load(x + i);
    best = larger(part, best);
    is_nan |= part != part;
  }
  float largest = max_of(best);
  bool any_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) any_nan |= is_nan[lane] != 0;
  for (; i < size; ++i) {
    any_nan |= x[i] != x[i];
    largest = x[i] > largest ? x[i] : largest;
  }
  return any_nan ? std::numeric_limits<float>::quiet_NaN() : largest;
}

// Index of the first entry that equals `value`, or that is NaN if `value` is.
int64_t first_place_of(float value, const float* x, int64_t size) {
  auto is_it = [&](float entry) { return entry == value || (value != value && entry != entry); };
  constexpr int64_t kBlock = 256;  // compared without a branch
  for (int64_t from = 0; from < size; from += kBlock) {
    const int64_t end = from + kBlock < size ? from + kBlock : size;
    int found = 0;
    for (int64_t i = from; i < end; ++i) found |= is_it(x[i]);
    for (int64_t i = from; found && i < end; ++i) {
      if (is_it(x[i])) return i;
    }
  }
  return 0;  // of no entries
}

// log of the sum of exp(x), given the largest of x; the largest itself where it is not finite.
float logsumexp(const float* x, int64_t size, float largest) {
  if (!std::isfinite(largest)) return largest;
  Vec sums = Vec{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += exp_negative(load(x + i) - largest);
  if (const int rest = static_cast<int>(size - i)) {
    Vec last = load_part(x + i, rest);
    for (int lane = rest; lane < kLanes; ++lane) last[lane] = kNone;
    sums += exp_negative(last - largest);
  }
  return largest + std::log(sum_of(sums));
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void rms_norm(const RmsNorm& n, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = n.x + row * n.size;
    Vec sums = Vec{};
    for (int64_t i = 0; i < n.size; i += kLanes) {
      const Vec part = load_any(x + i, n.size - i);
      sums += part * part;
    }
    const float inverse = 1.0f / std::sqrt(sum_of(sums) / static_cast<float>(n.size) + n.eps);
    for (int64_t i = 0; i < n.size; i += kLanes) {
      const int64_t left = n.size - i;
      const Vec scaled = load_any(x + i, left) * inverse * load_any(n.scale + i, left);
      store_any(n.y + row * n.size + i, scaled, left);
    }
  }
}

void swiglu(const Swiglu& s, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = s.x + row * 2 * s.size;
    for (int64_t i = 0; i < s.size; i += kLanes) {
      const int64_t left = s.size - i;
      const Vec a = load_any(x + i, left), b = load_any(x + s.size + i, left);
      store_any(s.y + row * s.size + i, a * sigmoid(a) * b, left);
    }
  }
}

void rope_qkv(const RopeQkv& r, int64_t first, int64_t last) {
  const int64_t half = r.head_dim / 2;
  auto rotate = [&](const float* from, float* to, int64_t token) {
    const float *cos = r.cos + token * half, *sin = r.sin + token * half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t left = half - i;
      const Vec a = load_any(from + i, left), b = load_any(from + half + i, left);
      const Vec c = load_any(cos + i, left), s = load_any(sin + i, left);
      store_any(to + i, multiply_add(a, c, -(b * s)), left);
      store_any(to + half + i, multiply_add(b, c, a * s), left);
    }
  };
  for (int64_t token = first; token < last; ++token) {
    for (int64_t head = 0; head < r.num_kv_heads; ++head) {
      const int64_t place = token * r.num_kv_heads + head;
      const float* from = r.qkv + place * (r.group + 2) * r.head_dim;
      for (int64_t g = 0; g < r.group; ++g, from += r.head_dim) {
        rotate(from, r.q + (place * r.group + g) * r.head_dim, token);
      }
      rotate(from, r.k + place * r.head_dim, token);
      __builtin_memcpy(r.v + place * r.head_dim, from + r.head_dim, r.head_dim * sizeof(float));
    }
  }
}

void argmax_logsumexp(const ArgmaxLogsumexp& l, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = l.x + row * l.size;
    const float largest = largest_of(x, l.size);
    l.argmax[row] = static_cast<int32_t>(first_place_of(largest, x, l.size));
    l.logsumexp[row] = logsumexp(x, l.size, largest);
  }
}

}  // namespace jaxpage::JAXPAGE_SET
