// What is computed row by row between and after the products: norm, gate, rotary positions, and
// what sampling wants of logits. Few passes on all threads, where XLA makes more on one.
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

JAXPAGE_INLINE void store_any(float* to, Vec value, int64_t left) {
  if (left >= kLanes) return store(to, value);
  for (int64_t i = 0; i < left; ++i) to[i] = value[i];
}

constexpr float kNone = -std::numeric_limits<float>::infinity();

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
  float most = max_of(best);
  bool any_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) any_nan |= is_nan[lane] != 0;
  for (; i < size; ++i) {
    any_nan |= x[i] != x[i];
    most = x[i] > most ? x[i] : most;
  }
  return any_nan ? std::numeric_limits<float>::quiet_NaN() : most;
}

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

// log of the sum of exp(x), `most` being the largest of x: that itself where it is not finite.
float log_sum_exp(const float* x, int64_t size, float most) {
  if (!std::isfinite(most)) return most;
  Vec sums = Vec{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += exp_negative(load(x + i) - most);
  if (const int rest = static_cast<int>(size - i)) {
    Vec last = load_part(x + i, rest);
    for (int lane = rest; lane < kLanes; ++lane) last[lane] = kNone;
    sums += exp_negative(last - most);
  }
  return most + std::log(sum_of(sums));
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void norm(const Norm& n, int64_t first, int64_t last) {
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

void gate(const Gate& g, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = g.x + row * 2 * g.size;
    for (int64_t i = 0; i < g.size; i += kLanes) {
      const int64_t left = g.size - i;
      const Vec by = load_any(x + i, left), value = load_any(x + g.size + i, left);
      store_any(g.y + row * g.size + i, by * sigmoid(by) * value, left);
    }
  }
}

void rotate(const Rotation& r, int64_t first, int64_t last) {
  const int64_t half = r.head_dim / 2;
  auto turn = [&](const float* from, float* to, int64_t token) {
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
        turn(from, r.q + (place * r.group + g) * r.head_dim, token);
      }
      turn(from, r.k + place * r.head_dim, token);
      __builtin_memcpy(r.v + place * r.head_dim, from + r.head_dim, r.head_dim * sizeof(float));
    }
  }
}

void summarise(const Logits& logits, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const float* x = logits.x + row * logits.size;
    const float most = largest_of(x, logits.size);
    logits.largest[row] = static_cast<int32_t>(first_place_of(most, x, logits.size));
    logits.log_sum_exp[row] = log_sum_exp(x, logits.size, most);
  }
}

}  // namespace jaxpage::JAXPAGE_SET
