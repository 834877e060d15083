// Vectors of the widest width that a source is compiled for, in the compiler's own vector
// extensions: one text for AVX-512, AVX2, NEON and anything else. Every function is inlined and in
// an unnamed namespace, so that no code of one width is ever shared with another.
#pragma once

#include <cstdint>
#include <utility>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#define JAXPAGE_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // floats of a vector
constexpr int kWide = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kWide = 2;
#else
constexpr int kLanes = 4;
constexpr int kWide = 2;
#endif
// A tile of attention: kQueries query vectors by kWide vectors of keys, or of a value's entries,
// with an accumulator each.
constexpr int kQueries = 6;

// A tile of matmul_few: kPanel outputs by kRows rows, with an accumulator each.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPanel = 4, kRows = 2;  // the processor has 16 vector registers
#else
constexpr int kPanel = 6, kRows = 4;  // 32
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct BFloat16 {
  uint16_t bits;
};

// Keeps a vector in a register. GCC would load it again for each multiplication, and loads are what
// limits a tile of products.
JAXPAGE_INLINE void hold(Vec& value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

// The number in every lane. Subtracting 0 costs no instruction; adding it would, for -0 + 0 is 0.
JAXPAGE_INLINE Vec splat(float value) { return value - Vec{}; }

JAXPAGE_INLINE Vec load(const float* from) {
  Vec value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

JAXPAGE_INLINE Vec load(const BFloat16* from) {  // bfloat16 is the upper half of a float
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return (Vec)(__builtin_convertvector(halves, Bits) << 16);
}

// The first `count` < kLanes entries, then zeros; no memory behind them is read.
template <class T>
JAXPAGE_INLINE Vec load_part(const T* from, int count) {
  T padded[kLanes] = {};
  if (kLanes > 8 && count == 8) {  // common, and a copy of a fixed size is one instruction
    __builtin_memcpy(padded, from, (kLanes < 8 ? kLanes : 8) * sizeof(T));
  } else {
    for (int i = 0; i < count; ++i) padded[i] = from[i];
  }
  return load(padded);
}

// kLanes entries, or the `left` that there are and then zeros.
template <class T>
JAXPAGE_INLINE Vec load_any(const T* from, int64_t left) {
  return left >= kLanes ? load(from) : load_part(from, static_cast<int>(left));
}

JAXPAGE_INLINE void store(float* to, Vec value) { __builtin_memcpy(to, &value, sizeof value); }

// a * b + c, rounded once where the set has such an instruction and twice where not. The compiler
// itself fuses nothing (-ffp-contract=off): it would in some tiles and not in others, and a row's
// bits would depend on its batch.
JAXPAGE_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

JAXPAGE_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

JAXPAGE_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where a is NaN

template <int... kIndex>
JAXPAGE_INLINE Vec shuffle(Vec a, Vec b, std::integer_sequence<int, kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  return __builtin_shuffle(a, b, Ints{kIndex...});
#endif
}

// a and b hold kLanes / kSegment sums each, every one spread over a segment of kSegment lanes. The
// result holds all of them, each over half a segment: for each segment that of a, then that of b.
template <int kSegment, int... kLane>
JAXPAGE_INLINE Vec fold(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = kSegment / 2;
  return shuffle(a, b, std::integer_sequence<int, kLane + (kLane & kHalf ? kLanes : 0)...>{}) +
         shuffle(a, b, std::integer_sequence<int, kLane & kHalf ? kLane - kHalf + kLanes
                                                                : kLane + kHalf...>{});
}

// Lane i of the result is the sum of the lanes of sums[i], for i < kLanes. All are added in the
// same order, so a sum does not depend on its place. (16 sums of 16 lanes: 15 additions, 15
// shuffles and 15 blends.)
template <int kSegment = kLanes>
JAXPAGE_INLINE Vec sum_each(const Vec* sums) {
  if constexpr (kSegment == 1) {
    return sums[0];
  } else {
    constexpr int kMany = kSegment / 2;
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    Vec folded[kMany];
    for (int i = 0; i < kMany; ++i) folded[i] = fold<kSegment>(sums[i], sums[i + kMany], lanes);
    return sum_each<kMany>(folded);
  }
}

// Exchanges lanes i and i ^ kDistance.
template <int kDistance, int... kLane>
JAXPAGE_INLINE Vec exchange(Vec v, std::integer_sequence<int, kLane...>) {
  return shuffle(v, v, std::integer_sequence<int, (kLane ^ kDistance)...>{});
}

// The largest lane, in every lane.
template <int kDistance = kLanes / 2>
JAXPAGE_INLINE Vec spread_max(Vec v) {
  if constexpr (kDistance == 0) {
    return v;
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    return spread_max<kDistance / 2>(larger(exchange<kDistance>(v, lanes), v));
  }
}

JAXPAGE_INLINE float max_of(Vec v) { return spread_max(v)[0]; }

// The sum of all lanes, in every lane.
template <int kDistance = kLanes / 2>
JAXPAGE_INLINE Vec spread_sum(Vec v) {
  if constexpr (kDistance == 0) {
    return v;
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
    return spread_sum<kDistance / 2>(v + exchange<kDistance>(v, lanes));
  }
}

JAXPAGE_INLINE float sum_of(Vec v) { return spread_sum(v)[0]; }

// In each group of four lanes: kSize lanes of a, then as many of b, and so on, taken from the lower
// half of the group (kUpper 0) or its upper half (1). kUpper 0: a0 b0 a1 b1, or with kSize 2
// a0 a1 b0 b1; kUpper 1: a2 b2 a3 b3, or a2 a3 b2 b3.
template <int kSize, int kUpper, int... kLane>
JAXPAGE_INLINE Vec zip(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  return shuffle(a, b,
                 std::integer_sequence<int, kLane / 4 * 4 + kUpper * 2 +
                                                kLane % 4 / (2 * kSize) * kSize + kLane % kSize +
                                                kLane / kSize % 2 * kLanes...>{});
}

// Of each pair of blocks of kSide lanes the lower one (kUpper 0) or the upper one (1) of a, then
// that of b.
template <int kSide, int kUpper, int... kLane>
JAXPAGE_INLINE Vec cross(Vec a, Vec b, std::integer_sequence<int, kLane...>) {
  return shuffle(a, b, std::integer_sequence<int, (kLane & ~kSide) + kUpper * kSide +
                                                      (kLane & kSide ? kLanes : 0)...>{});
}

// Of kLanes rows seen as blocks of kSide x kSide: exchanges the two blocks beside the diagonal of
// each square of four blocks.
template <int kSide>
JAXPAGE_INLINE void cross_rows(Vec* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  for (int i = 0; i < kLanes; ++i) {
    if (i & kSide) continue;
    const Vec a = rows[i], b = rows[i + kSide];
    rows[i] = cross<kSide, 0>(a, b, lanes);
    rows[i + kSide] = cross<kSide, 1>(a, b, lanes);
  }
}

// Transposes kLanes rows in place: inside blocks of 4 x 4 first, then the blocks.
JAXPAGE_INLINE void transpose(Vec* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  for (Vec* four = rows; four < rows + kLanes; four += 4) {
    const Vec ab = zip<1, 0>(four[0], four[1], lanes), ab_up = zip<1, 1>(four[0], four[1], lanes);
    const Vec cd = zip<1, 0>(four[2], four[3], lanes), cd_up = zip<1, 1>(four[2], four[3], lanes);
    four[0] = zip<2, 0>(ab, cd, lanes), four[1] = zip<2, 1>(ab, cd, lanes);
    four[2] = zip<2, 0>(ab_up, cd_up, lanes), four[3] = zip<2, 1>(ab_up, cd_up, lanes);
  }
  if constexpr (kLanes > 4) cross_rows<4>(rows);
  if constexpr (kLanes > 8) cross_rows<8>(rows);
}

// e to the x for x <= 0, right to about one unit in the last place; 0 below -87, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial, 2^n by the exponent's bits.
JAXPAGE_INLINE Vec exp_negative(Vec x) {
  const Vec lowest = splat(-87.0f), rounder = splat(12582912.0f);  // 1.5 * 2^23
  const Vec bounded = x < lowest ? lowest : x;
  const Vec shifted = multiply_add(bounded, splat(1.44269504f), rounder);
  const Vec n = shifted - rounder;
  Vec r = multiply_add(n, splat(-0.693359375f), bounded);
  r = multiply_add(n, splat(2.12194440e-4f), r);
  Vec power = splat(1.0f / 5040);
  power = multiply_add(power, r, splat(1.0f / 720));
  power = multiply_add(power, r, splat(1.0f / 120));
  power = multiply_add(power, r, splat(1.0f / 24));
  power = multiply_add(power, r, splat(1.0f / 6));
  power = multiply_add(power, r, splat(0.5f));
  power = multiply_add(power, r, splat(1.0f));
  power = multiply_add(power, r, splat(1.0f));
  const Vec scale = (Vec)(((Ints)shifted - (Ints)rounder + 127) << 23);
  return x < lowest ? splat(0) : power * scale;
}

}  // namespace
