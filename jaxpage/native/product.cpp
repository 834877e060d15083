// Matrix products of few rows: reading w is most of the work.
#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

// A tile is kPanel outputs (rows of w) by kPair rows of x. It is high and narrow because x comes
// from the second level of cache, while kDepth entries of a panel stay in the first; kBatch rows
// share them before the next ones are taken up.
constexpr int64_t kDepth = 640;
constexpr int64_t kBatch = 64;

// Entries from .. to - 1 of a tile, whose first `outputs` outputs are real; sums of a part that is
// not the last wait in `kept`.
template <int kUsed, class W, class Step>
JAXPAGE_INLINE void product_tile(const Product& p, const W* const* w, int64_t row, int64_t output,
                                 int64_t outputs, int64_t from, int64_t to, Vec (*kept)[kPanel],
                                 Step step) {
  const float* x[kPair];
  for (int c = 0; c < kUsed; ++c) x[c] = p.x + (row + c) * p.size;
  Vec sums[kPair][kPanel];
  for (int c = 0; c < kUsed; ++c) {
    for (int r = 0; r < kPanel; ++r) sums[c][r] = from ? kept[c][r] : Vec{};
  }
  dot_tile<kPanel, kUsed>(w, x, from, to, sums, step);
  if (to < p.size) {
    for (int c = 0; c < kUsed; ++c) {
      for (int r = 0; r < kPanel; ++r) kept[c][r] = sums[c][r];
    }
    return;
  }
  float results[kPair][kPanel];
  finish_tile<kPanel, kUsed>(sums, results);
  for (int c = 0; c < kUsed; ++c) {
    float* y = p.y + (row + c) * p.num_outputs + output;
    if (outputs == kPanel) {
      __builtin_memcpy(y, results[c], sizeof results[c]);
    } else {
      for (int64_t r = 0; r < outputs; ++r) y[r] = results[c][r];
    }
  }
}

// A panel comes from memory while the one before is multiplied: between any two steps of a tile a
// cache line or more of the next panel is asked for, of the next job's first one too.
template <class W>
JAXPAGE_INLINE void product_panels(const Product& p, int64_t first, int64_t last, int64_t asked) {
  const W* all = static_cast<const W*>(p.w);
  const int64_t bytes = kPanel * p.size * static_cast<int64_t>(sizeof(W));
  const int64_t steps = (p.num_rows + 1) / 2 * (p.size / kLanes) + 1;
  const int64_t lines_a_step = (bytes / 64 + steps - 1) / steps;
  Vec kept[kBatch][kPanel];
  for (int64_t output = first; output < last; output += kPanel) {
    const int64_t outputs = last - output < kPanel ? last - output : kPanel;
    const W* w[kPanel];
    for (int r = 0; r < kPanel; ++r) w[r] = all + (output + (r < outputs ? r : 0)) * p.size;
    const char* ahead = reinterpret_cast<const char*>(all + (output + kPanel) * p.size);
    const char* end = output + 2 * kPanel <= asked ? ahead + bytes : ahead;
    auto prefetch = [&] {
      for (int64_t line = 0; line < lines_a_step && ahead < end; ++line, ahead += 64) {
        __builtin_prefetch(ahead, 0, 2);  // into the second level of cache
      }
    };
    for (int64_t batch = 0; batch < p.num_rows; batch += kBatch) {
      const int64_t rows = p.num_rows - batch < kBatch ? p.num_rows - batch : kBatch;
      for (int64_t from = 0; from < p.size; from += kDepth) {
        const int64_t to = from + kDepth < p.size ? from + kDepth : p.size;
        int64_t row = 0;
        for (; row + kPair <= rows; row += kPair) {
          product_tile<kPair>(p, w, batch + row, output, outputs, from, to, kept + row, prefetch);
        }
        if (row < rows) {
          product_tile<1>(p, w, batch + row, output, outputs, from, to, kept + row, prefetch);
        }
      }
    }
  }
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void product(const Product& p, bool is_bfloat16, int64_t first, int64_t last, int64_t asked) {
  is_bfloat16 ? product_panels<BFloat16>(p, first, last, asked)
              : product_panels<float>(p, first, last, asked);
}

}  // namespace jaxpage::JAXPAGE_SET
