// The kernels themselves, compiled once for each instruction set (JAXPAGE_KERNELS names the table).
#include "kernels.h"

#include "simd.h"

namespace {

using namespace jaxpage;

constexpr float kMasked = -1e30f;  // -inf minus -inf would be NaN
constexpr float kNothing = kMasked / 2;  // top score of no keys: masked keys weigh 0 beside it
constexpr float kTiny = 1.17549435e-38f;

// ---- products ----

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
// cache line or more of the next panel is asked for.
template <class W>
JAXPAGE_INLINE void product_panels(const Product& p, int64_t first, int64_t last) {
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
    const char* end = output + 2 * kPanel <= last ? ahead + bytes : ahead;
    auto prefetch = [&] {
      for (int64_t line = 0; line < lines_a_step && ahead < end; ++line, ahead += 64) {
        __builtin_prefetch(ahead, 0, 3);
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

void product(const Product& p, bool is_bfloat16, int64_t first, int64_t last) {
  is_bfloat16 ? product_panels<BFloat16>(p, first, last) : product_panels<float>(p, first, last);
}

// ---- attention ----

struct State {
  float* acc;    // [vectors, padded H]
  float* top;    // [vectors]
  float* total;  // [vectors]
  State(float* at, int64_t vectors, int64_t padded)
      : acc(at), top(at + vectors * padded), total(top + vectors) {}
};

// One chunk of keys: offsets of its live tokens, `low` .. `high` - 1, in a pool, and its position.
struct Chunk {
  int64_t base, low, high;
  int64_t offsets[kChunk];
};

template <class T>
Chunk locate(const Attention& a, const AttentionJob& job, int64_t base, int64_t start,
             int64_t end) {
  Chunk chunk;
  chunk.base = base;
  chunk.low = start > base ? start - base : 0;
  chunk.high = end - base < kChunk ? end - base : kChunk;
  const int32_t* table = a.block_tables + job.row * a.table_width;
  int64_t index = (base + chunk.low) / a.block_size, inside = (base + chunk.low) % a.block_size;
  int64_t block = 0;
  for (int64_t t = chunk.low; t < chunk.high; ++t) {
    if (t == chunk.low || inside == 0) {
      block = table[index];
      block = block < 0 ? 0 : block >= a.num_blocks ? a.num_blocks - 1 : block;
    }
    const int64_t slot = block * a.block_size + inside;
    chunk.offsets[t] = (slot * a.num_kv_heads + job.kv_head) * a.head_dim;
    if (++inside == a.block_size) inside = 0, ++index;
  }
  // Tiles of four keys reach beyond the live ones: they read a live one and are masked.
  for (int64_t t = chunk.low & ~3; t < chunk.low; ++t) chunk.offsets[t] = chunk.offsets[chunk.low];
  for (int64_t t = chunk.high; t % 4; ++t) chunk.offsets[t] = chunk.offsets[chunk.low];
  return chunk;
}

template <int kUsed, class T>
JAXPAGE_INLINE void score_tile(const Attention& a, const Chunk& chunk, const float* q,
                               float* scores) {
  const T* pool = static_cast<const T*>(a.k_pool);
  const float* queries[kColumns];
  for (int c = 0; c < kUsed; ++c) queries[c] = q + c * padded_dim(a.head_dim);
  for (int64_t t = chunk.low & ~3; t < chunk.high; t += kKeys) {
    const T* keys[kKeys];
    for (int r = 0; r < kKeys; ++r) keys[r] = pool + chunk.offsets[t + r];
    Vec sums[kColumns][kKeys] = {};
    dot_tile<kKeys, kUsed>(keys, queries, 0, a.head_dim, sums, [] {});
    float results[kColumns][kKeys];
    finish_tile<kKeys, kUsed>(sums, results);
    for (int c = 0; c < kUsed; ++c) {
      __builtin_memcpy(scores + c * kChunk + t, results[c], sizeof results[c]);
    }
  }
}

// Scores to weights: masks keys outside `low` .. `high` - 1, moves the largest score, returns the
// factor by which what was summed so far fades.
JAXPAGE_INLINE float weigh(float* scores, int64_t low, int64_t high, float& top, float& total) {
  Vec best = splat(kMasked), parts[kChunk / kLanes];
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int i = 0; i < kChunk / kLanes; ++i) {
    const Ints key = lane + i * kLanes;
    const Ints seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
    parts[i] = seen ? load(scores + i * kLanes) : splat(kMasked);
    best = larger(parts[i], best);
  }
  const float most = max_of(best), raised = most > top ? most : top;
  Vec sum = Vec{};
  for (int i = 0; i < kChunk / kLanes; ++i) {
    parts[i] = exp_negative(parts[i] - raised);
    sum += parts[i];
    store(scores + i * kLanes, parts[i]);
  }
  const float fade = exp_negative(splat(top - raised))[0];
  top = raised;
  total = total * fade + sum_of(sum);
  return fade;
}

// acc = acc * fade + weights . V for `kUsed` queries and `kVecs` vectors of the head, from `at` on.
template <int kUsed, int kVecs, class T>
JAXPAGE_INLINE void add_values(const Attention& a, const Chunk& chunk, const float* weights,
                               const float* fades, float* acc, int64_t at, int part) {
  const T* pool = static_cast<const T*>(a.v_pool) + at;
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs];
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) {
      sums[c][i] = load(acc + c * padded + at + i * kLanes) * fades[c];
    }
  }
  for (int64_t t = chunk.low; t < chunk.high; ++t) {
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) {
      const T* from = pool + chunk.offsets[t] + i * kLanes;
      value[i] = part ? load_part(from, part) : load(from);
    }
    for (int c = 0; c < kUsed; ++c) {
      const float weight = weights[c * kChunk + t];
      for (int i = 0; i < kVecs; ++i) sums[c][i] += value[i] * weight;
    }
  }
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(acc + c * padded + at + i * kLanes, sums[c][i]);
  }
}

template <int kUsed, class T>
JAXPAGE_INLINE void add_head(const Attention& a, const Chunk& chunk, const float* weights,
                             const float* fades, float* acc) {
  constexpr int kWide = 4;
  const int64_t whole = a.head_dim / kLanes * kLanes;
  int64_t at = 0;
  for (; at + kWide * kLanes <= whole; at += kWide * kLanes) {
    add_values<kUsed, kWide, T>(a, chunk, weights, fades, acc, at, 0);
  }
  for (; at < whole; at += kLanes) add_values<kUsed, 1, T>(a, chunk, weights, fades, acc, at, 0);
  if (at < a.head_dim) {
    add_values<kUsed, 1, T>(a, chunk, weights, fades, acc, at, static_cast<int>(a.head_dim - at));
  }
}

// One chunk for `kUsed` query vectors, the first of which is vector `first` of the job.
template <int kUsed, class T>
JAXPAGE_INLINE void add_chunk(const Attention& a, const AttentionJob& job, const Chunk& chunk,
                              int64_t first, const float* q, float* scores, State state) {
  const int64_t padded = padded_dim(a.head_dim);
  scores += first * kChunk;
  score_tile<kUsed, T>(a, chunk, q + first * padded, scores);
  float fades[kUsed];
  for (int c = 0; c < kUsed; ++c) {
    const int64_t position = job.first_position + (first + c) / a.group;
    const int64_t oldest = position - a.window + 1 - chunk.base, newest = position - chunk.base;
    const int64_t low = oldest > chunk.low ? oldest < kChunk ? oldest : kChunk : chunk.low;
    const int64_t high = newest < chunk.high ? newest < 0 ? 0 : newest + 1 : chunk.high;
    fades[c] = weigh(scores + c * kChunk, low, high, state.top[first + c], state.total[first + c]);
  }
  add_head<kUsed, T>(a, chunk, scores, fades, state.acc + first * padded);
}

void clear(State state, int64_t vectors, int64_t padded) {
  for (int64_t i = 0; i < vectors * padded; ++i) state.acc[i] = 0;
  for (int64_t i = 0; i < vectors; ++i) state.top[i] = kNothing, state.total[i] = 0;
}

// Keys of one partition, added to an empty state.
template <class T>
void attend_partition(const Attention& a, const AttentionJob& job, int64_t partition,
                      const float* q, float* scores, State state) {
  const int64_t vectors = job.num_tokens * a.group;
  clear(state, vectors, padded_dim(a.head_dim));
  const int64_t oldest = job.first_position - a.window + 1;
  const int64_t start = oldest > 0 ? oldest : 0, end = job.first_position + job.num_tokens;
  for (int64_t base = partition * kPartition; base < (partition + 1) * kPartition; base += kChunk) {
    if (base >= end || base + kChunk <= start) continue;
    const Chunk chunk = locate<T>(a, job, base, start, end);
    int64_t first = 0;
    for (; first + kColumns <= vectors; first += kColumns) {
      add_chunk<kColumns, T>(a, job, chunk, first, q, scores, state);
    }
    const int64_t left = vectors - first;
    if (left == 1) add_chunk<1, T>(a, job, chunk, first, q, scores, state);
    if constexpr (kColumns > 2) {
      if (left == 2) add_chunk<2, T>(a, job, chunk, first, q, scores, state);
      if (left == 3) add_chunk<3, T>(a, job, chunk, first, q, scores, state);
    }
  }
}

// Adds `more` to `state`, which comes before it.
void merge_states(State state, State more, int64_t vectors, int64_t padded) {
  for (int64_t v = 0; v < vectors; ++v) {
    const float top = more.top[v] > state.top[v] ? more.top[v] : state.top[v];
    const float fade = exp_negative(splat(state.top[v] - top))[0];
    const float weight = exp_negative(splat(more.top[v] - top))[0];
    for (int64_t i = v * padded; i < (v + 1) * padded; i += kLanes) {
      store(state.acc + i, load(state.acc + i) * fade + load(more.acc + i) * weight);
    }
    state.top[v] = top;
    state.total[v] = state.total[v] * fade + more.total[v] * weight;
  }
}

void write_out(const Attention& a, const AttentionJob& job, State state) {
  const int64_t padded = padded_dim(a.head_dim), num_heads = a.num_kv_heads * a.group;
  for (int64_t v = 0; v < job.num_tokens * a.group; ++v) {
    const int64_t token = job.first_token + v / a.group, head = job.kv_head * a.group + v % a.group;
    float* out = a.out + (token * num_heads + head) * a.head_dim;
    const float total = state.total[v] > kTiny ? state.total[v] : kTiny;  // of nothing: 0 / tiny
    for (int64_t i = 0; i < a.head_dim; ++i) out[i] = state.acc[v * padded + i] / total;
  }
}

template <class T>
void attend_typed(const Attention& a, const AttentionJob& job, float* scratch) {
  const int64_t padded = padded_dim(a.head_dim), num_heads = a.num_kv_heads * a.group;
  const int64_t vectors = job.num_tokens * a.group;
  float* q = scratch;
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t token = job.first_token + v / a.group, head = job.kv_head * a.group + v % a.group;
    const float* from = a.q + (token * num_heads + head) * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; ++i) q[v * padded + i] = from[i] * a.scale;
  }
  float* scores = q + vectors * padded;
  float* states = scores + vectors * kChunk;
  State state(job.partial ? job.partial : states, vectors, padded);
  State more(states + state_floats(vectors, a.head_dim), vectors, padded);
  attend_partition<T>(a, job, job.first_partition, q, scores, state);
  for (int64_t partition = job.first_partition + 1; partition < job.last_partition; ++partition) {
    attend_partition<T>(a, job, partition, q, scores, more);
    merge_states(state, more, vectors, padded);
  }
  if (!job.partial) write_out(a, job, state);
}

void attend(const Attention& a, bool is_bfloat16, const AttentionJob& job, float* scratch) {
  is_bfloat16 ? attend_typed<BFloat16>(a, job, scratch) : attend_typed<float>(a, job, scratch);
}

void merge(const Attention& a, const AttentionJob& job, const float* partials, float* scratch) {
  const int64_t padded = padded_dim(a.head_dim), vectors = job.num_tokens * a.group;
  const int64_t floats = state_floats(vectors, a.head_dim);
  __builtin_memcpy(scratch, partials, floats * sizeof(float));
  State state(scratch, vectors, padded);
  for (int64_t p = 1; p < job.last_partition - job.first_partition; ++p) {
    const State more(const_cast<float*>(partials) + p * floats, vectors, padded);
    merge_states(state, more, vectors, padded);
  }
  write_out(a, job, state);
}

}  // namespace

const jaxpage::Kernels jaxpage::JAXPAGE_KERNELS = {product, attend, merge};
