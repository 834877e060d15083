// Matrix products of few rows: reading w is most of the work.
#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

// A tile is kPanel outputs (rows of w) by up to kRows rows of x, and both in kLanes entries at a
// time. x comes from the second level of cache, while kDepth entries of a panel stay in the first;
// kBatch rows share them before the next ones are taken up.
constexpr int64_t kDepth = 640;
constexpr int64_t kBatch = 64;
static_assert(kFewOutputs % kPanel == 0);

// What comes next of w, asked for a little at a time: memory is busy all along, and never so much
// that a product waits for a place in the queue.
struct Ahead {
  const char* at;    // what was not asked for yet
  const char* due;   // what should have been
  int64_t bytes;     // due more with each turn
  JAXPAGE_INLINE void take_turn() {
    for (due += bytes; at < due; at += 64) {
      __builtin_prefetch(at, 0, 2);  // into the second level of cache
    }
  }
};

constexpr int64_t kTurnsOfSums = 2;  // that many, while kLanes sums are added up

// How much is asked for with each turn, so that a panel is whole when all rows are through.
int64_t bytes_a_turn(const Product& p, int64_t panel_bytes) {
  const int64_t tiles = (p.num_rows + kRows - 1) / kRows;
  const int64_t groups = (p.num_rows * kPanel + kLanes - 1) / kLanes;
  const int64_t turns = tiles * (p.size / kLanes) + groups * kTurnsOfSums;
  return (panel_bytes + turns - 1) / turns;
}

// Adds entries from .. to - 1 of kHigh rows of w by kUsed rows of x to sums[row of x][row of w].
// One accumulator a dot product: the order of addition is the same in any tile.
template <int kHigh, int kUsed, class W>
JAXPAGE_INLINE void add_tile(const W* w, const float* x, int64_t size, int64_t from, int64_t to,
                             Vec (*sums)[kHigh], Ahead& what_follows) {
  Ahead ahead = what_follows;  // in registers
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
    ahead.take_turn();
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
  what_follows = ahead;
}

template <int kHigh, int kUsed, class W>
JAXPAGE_INLINE void add_rows(const W* w, const float* x, int64_t size, int64_t num_rows,
                             int64_t from, int64_t to, Vec (*sums)[kHigh], Ahead& ahead) {
  int64_t row = 0;
  for (; row + kUsed <= num_rows; row += kUsed) {
    add_tile<kHigh, kUsed>(w, x + row * size, size, from, to, sums + row, ahead);
  }
  if constexpr (kUsed > 1) {
    add_rows<kHigh, kUsed / 2>(w, x + row * size, size, num_rows - row, from, to, sums + row,
                               ahead);
  }
}

// Outputs `output` .. output + kHigh - 1 of all rows.
template <int kHigh, class W>
JAXPAGE_INLINE void add_panel(const Product& p, int64_t output, Ahead ahead) {
  const W* w = static_cast<const W*>(p.w) + output * p.size;
  for (int64_t first = 0; first < p.num_rows; first += kBatch) {
    const int64_t rows = p.num_rows - first < kBatch ? p.num_rows - first : kBatch;
    Vec sums[kBatch + kLanes][kHigh];
    for (int64_t from = 0; from < p.size; from += kDepth) {
      const int64_t to = from + kDepth < p.size ? from + kDepth : p.size;
      add_rows<kHigh, kRows>(w, p.x + first * p.size, p.size, rows, from, to, sums, ahead);
    }
    Vec* flat = &sums[0][0];
    int64_t count = rows * kHigh;
    for (; count % kLanes; ++count) flat[count] = Vec{};
    alignas(64) float y[(kBatch + kLanes) * kHigh];
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int turn = 0; turn < kTurnsOfSums; ++turn) ahead.take_turn();
      store(y + i, sum_each(flat + i));
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = p.y + (first + row) * p.num_outputs + output;
      __builtin_memcpy(to, y + row * kHigh, sizeof(float) * kHigh);
    }
  }
}

// While a panel is multiplied the next one is asked for, of the next job's the first.
template <class W>
void add_panels(const Product& p, const ProductPart& part) {
  const char* all = static_cast<const char*>(p.w);
  const int64_t row_bytes = p.size * static_cast<int64_t>(sizeof(W));
  const int64_t bytes = bytes_a_turn(p, kPanel * row_bytes);
  int64_t output = part.first;
  for (; output + kPanel <= part.last; output += kPanel) {
    const char* next = all + (output + kPanel) * row_bytes;
    const bool is_last = output + 2 * kPanel > part.asked;
    add_panel<kPanel, W>(p, output, {next, next, is_last ? 0 : bytes});
  }
  for (; output < part.last; ++output) add_panel<1, W>(p, output, {all, all, 0});
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void product_few(const Product& p, bool is_bfloat16, const ProductPart& part) {
  (is_bfloat16 ? add_panels<BFloat16> : add_panels<float>)(p, part);
}

}  // namespace jaxpage::JAXPAGE_SET
