// Matrix products of many rows: most of the work is arithmetic. A panel of w is transposed once for
// a block of rows of x; then each lane of a vector is one output, and no sum goes across lanes.
#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

// A panel is kWidth outputs; a tile is a panel by up to kTall rows of x.
constexpr int kVecs = 2;
constexpr int64_t kWidth = kVecs * kLanes;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kTall = 6;  // of 16 registers
#else
constexpr int kTall = 12;  // of 32
#endif
static_assert(kManyOutputs % kWidth == 0);

// Transposes rows output .. output + kWidth - 1 of w to columns [size, kWidth]; zeros for rows
// beyond the last.
template <class W>
void transpose_panel(const Matmul& p, int64_t output, float* columns) {
  const W* w = static_cast<const W*>(p.w);
  for (int64_t i = 0; i < p.size; i += kLanes) {
    const int64_t left = p.size - i, count = left < kLanes ? left : kLanes;
    for (int64_t side = 0; side < kWidth; side += kLanes) {
      Vec rows[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const int64_t row = output + side + r;
        rows[r] = row < p.num_outputs ? load_any(w + row * p.size + i, left) : Vec{};
      }
      transpose(rows);
      for (int64_t entry = 0; entry < count; ++entry) {
        store(columns + (i + entry) * kWidth + side, rows[entry]);
      }
    }
  }
}

// Computes kWidth outputs, from `output` on, of kUsed rows, from `row` on.
template <int kUsed>
JAXPAGE_INLINE void multiply_tile(const Matmul& p, const float* columns, int64_t row,
                                  int64_t output) {
  const float* x = p.x + row * p.size;
  for (int c = 0; c < kUsed; ++c) {
    const float* y = p.y + (row + c) * p.num_outputs + output;
    for (int v = 0; v < kVecs; ++v) __builtin_prefetch(y + v * kLanes, 1, 3);  // to be written
  }
  Vec sums[kUsed][kVecs] = {};
  int64_t places[kUsed];  // of the rows, relative to x: kept in registers, while x alone moves
  for (int c = 0; c < kUsed; ++c) {
    places[c] = c * p.size;
    if (c > 0) asm("" : "+r"(places[c]));
  }
  for (const float* end = columns + p.size * kWidth; columns < end; columns += kWidth, ++x) {
    asm("" : "+r"(x));
    Vec w[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      w[v] = load(columns + v * kLanes);
      hold(w[v]);
    }
    for (int c = 0; c < kUsed; ++c) {
      Vec value = splat(x[places[c]]);
      hold(value);
      for (int v = 0; v < kVecs; ++v) sums[c][v] = multiply_add(w[v], value, sums[c][v]);
    }
  }
  const int64_t width = p.num_outputs - output < kWidth ? p.num_outputs - output : kWidth;
  for (int c = 0; c < kUsed; ++c) {
    float* y = p.y + (row + c) * p.num_outputs + output;
    if (width == kWidth) {
      for (int v = 0; v < kVecs; ++v) store(y + v * kLanes, sums[c][v]);
    } else {
      for (int64_t i = 0; i < width; ++i) y[i] = sums[c][i / kLanes][i % kLanes];
    }
  }
}

// Rows row .. last - 1 of a panel, tile by tile. Before each tile a part of the next panel, which
// begins at `next`, is prefetched: bytes_a_row for each of its rows.
template <int kUsed>
void multiply_rows(const Matmul& p, const float* columns, int64_t row, int64_t last,
                   int64_t output, const char* next, int64_t bytes_a_row) {
  for (; row + kUsed <= last; row += kUsed) {
    const char* due = next + kUsed * bytes_a_row;
    for (; next < due; next += 64) __builtin_prefetch(next, 0, 2);
    multiply_tile<kUsed>(p, columns, row, output);
  }
  if constexpr (kUsed > 1) {
    multiply_rows<kUsed / 2>(p, columns, row, last, output, next, bytes_a_row);
  }
}

// One job: its outputs panel by panel, each over all of its rows.
template <class W>
void multiply(const Matmul& p, const MatmulPart& part, float* columns) {
  const int64_t rows = part.last_row - part.first_row, size = p.size * sizeof(W);
  const char* w = static_cast<const char*>(p.w);
  for (int64_t output = part.first; output < part.last; output += kWidth) {
    const int64_t next = output + kWidth;
    const int64_t fetched = part.prefetch_end - next < kWidth ? part.prefetch_end - next : kWidth;
    transpose_panel<W>(p, output, columns);
    multiply_rows<kTall>(p, columns, part.first_row, part.last_row, output, w + next * size,
                         fetched > 0 ? (fetched * size + rows - 1) / rows : 0);
  }
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void matmul_many(const Matmul& p, bool is_bfloat16, const MatmulPart& part, float* scratch) {
  (is_bfloat16 ? multiply<BFloat16> : multiply<float>)(p, part, scratch);
}

}  // namespace jaxpage::JAXPAGE_SET
