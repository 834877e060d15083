// Matrix products of few rows: most of the work is to read w, so each row of w is read once for all
// rows of x. A sum is spread over the lanes of a vector, which are added up at the end.
#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

// A panel is kPanel outputs (rows of w); a tile is a panel by up to kRows rows of x, multiplied
// kLanes entries at a time. kDepth entries of a panel stay in the first level of cache while up to
// kBatch rows of x, from the second level, are multiplied by them.
constexpr int64_t kDepth = 640;
constexpr int64_t kBatch = 64;
static_assert(kFewOutputs % kPanel == 0);

// Prefetches the next panel of w, a little at each step: memory is busy all along, but never so
// much that the reads of this panel wait.
struct Prefetcher {
  const char* at;   // the next address to prefetch
  const char* due;  // the address to have reached by now
  int64_t bytes;    // to prefetch at each step
  JAXPAGE_INLINE void step() {
    for (due += bytes; at < due; at += 64) {
      __builtin_prefetch(at, 0, 2);  // into the second level of cache
    }
  }
};

constexpr int64_t kStepsOfSums = 2;  // steps while kLanes sums are added up

// How many bytes to prefetch at each step, so that a panel is there when all rows are done.
int64_t bytes_a_step(const Matmul& p, int64_t panel_bytes) {
  const int64_t tiles = (p.num_rows + kRows - 1) / kRows;
  const int64_t groups = (p.num_rows * kPanel + kLanes - 1) / kLanes;
  const int64_t steps = tiles * (p.size / kLanes) + groups * kStepsOfSums;
  return (panel_bytes + steps - 1) / steps;
}

// Adds the products of entries from .. to - 1, of kHigh rows of w by kUsed rows of x, to
// sums[row of x][row of w]. Each dot product has one accumulator, so the order of addition is the
// same in any tile.
template <int kHigh, int kUsed, class W>
JAXPAGE_INLINE void add_tile(const W* w, const float* x, int64_t size, int64_t from, int64_t to,
                             Vec (*sums)[kHigh], Prefetcher& prefetcher) {
  Prefetcher local = prefetcher;  // a copy stays in registers
  Vec held[kUsed][kHigh];
  for (int c = 0; c < kUsed; ++c) {
    for (int r = 0; r < kHigh; ++r) held[c][r] = from ? sums[c][r] : Vec{};
  }
  int64_t i = from;
  for (; i + kLanes <= to; i += kLanes) {
    Vec left[kHigh];
    for (int r = 0; r < kHigh; ++r) {
      left[r] = load(w + r * size + i);
      hold(left[r]);
    }
    local.step();
    for (int c = 0; c < kUsed; ++c) {
      Vec right = load(x + c * size + i);
      hold(right);
      for (int r = 0; r < kHigh; ++r) held[c][r] = multiply_add(left[r], right, held[c][r]);
    }
  }
  if (const int rest = static_cast<int>(to - i)) {
    for (int c = 0; c < kUsed; ++c) {
      const Vec right = load_part(x + c * size + i, rest);
      for (int r = 0; r < kHigh; ++r) {
        held[c][r] = multiply_add(load_part(w + r * size + i, rest), right, held[c][r]);
      }
    }
  }
  for (int c = 0; c < kUsed; ++c) {
    for (int r = 0; r < kHigh; ++r) sums[c][r] = held[c][r];
  }
  prefetcher = local;
}

// add_tile over num_rows rows of x, in tiles of kUsed and then of fewer.
template <int kHigh, int kUsed, class W>
JAXPAGE_INLINE void add_rows(const W* w, const float* x, int64_t size, int64_t num_rows,
                             int64_t from, int64_t to, Vec (*sums)[kHigh],
                             Prefetcher& prefetcher) {
  int64_t row = 0;
  for (; row + kUsed <= num_rows; row += kUsed) {
    add_tile<kHigh, kUsed>(w, x + row * size, size, from, to, sums + row, prefetcher);
  }
  if constexpr (kUsed > 1) {
    add_rows<kHigh, kUsed / 2>(w, x + row * size, size, num_rows - row, from, to, sums + row,
                               prefetcher);
  }
}

// Computes outputs output .. output + kHigh - 1 of all rows.
template <int kHigh, class W>
JAXPAGE_INLINE void add_panel(const Matmul& p, int64_t output, Prefetcher prefetcher) {
  const W* w = static_cast<const W*>(p.w) + output * p.size;
  for (int64_t first = 0; first < p.num_rows; first += kBatch) {
    const int64_t rows = p.num_rows - first < kBatch ? p.num_rows - first : kBatch;
    Vec sums[kBatch + kLanes][kHigh];
    for (int64_t from = 0; from < p.size; from += kDepth) {
      const int64_t to = from + kDepth < p.size ? from + kDepth : p.size;
      add_rows<kHigh, kRows>(w, p.x + first * p.size, p.size, rows, from, to, sums,
                             prefetcher);
    }
    Vec* flat = &sums[0][0];
    int64_t count = rows * kHigh;
    for (; count % kLanes; ++count) flat[count] = Vec{};
    alignas(64) float y[(kBatch + kLanes) * kHigh];
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int step = 0; step < kStepsOfSums; ++step) prefetcher.step();
      store(y + i, sum_each(flat + i));
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = p.y + (first + row) * p.num_outputs + output;
      __builtin_memcpy(to, y + row * kHigh, sizeof(float) * kHigh);
    }
  }
}

// The outputs of a job, panel by panel; meanwhile the next panel is prefetched, up to prefetch_end.
template <class W>
void add_panels(const Matmul& p, const MatmulPart& part) {
  const char* all = static_cast<const char*>(p.w);
  const int64_t row_bytes = p.size * static_cast<int64_t>(sizeof(W));
  const int64_t bytes = bytes_a_step(p, kPanel * row_bytes);
  int64_t output = part.first;
  for (; output + kPanel <= part.last; output += kPanel) {
    const char* next = all + (output + kPanel) * row_bytes;
    const bool is_last = output + 2 * kPanel > part.prefetch_end;
    add_panel<kPanel, W>(p, output, {next, next, is_last ? 0 : bytes});
  }
  for (; output < part.last; ++output) add_panel<1, W>(p, output, {all, all, 0});
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void matmul_few(const Matmul& p, bool is_bfloat16, const MatmulPart& part) {
  (is_bfloat16 ? add_panels<BFloat16> : add_panels<float>)(p, part);
}

}  // namespace jaxpage::JAXPAGE_SET
