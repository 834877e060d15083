// Attention over a paged pool: one function for decode, prefill and mixed steps.
#include "attention_scores.h"
#include "kernels.h"
#include "simd.h"

namespace {

using namespace jaxpage;

constexpr float kTiny = 1.17549435e-38f;
constexpr int64_t kChunks = kPartition / kChunk;

struct State {
  float* acc;    // [vectors, padded H]
  float* top;    // [vectors]
  float* total;  // [vectors]
  State(float* at, int64_t vectors, int64_t padded)
      : acc(at), top(at + vectors * padded), total(top + vectors) {}
};

// acc = acc * fade + weights . V over the keys `seen`, for `kUsed` queries and `kVecs` vectors of the
// head, from `at` on. With kAsks the keys of `ahead` are asked for meanwhile.
template <int kUsed, int kVecs, bool kAsks, class T>
JAXPAGE_INLINE void add_values(const Attention& a, const Chunk& chunk, Keys seen,
                               const Chunk* ahead, const float* weights, const float* fades,
                               float* acc, int64_t at, int part) {
  const T* pool = static_cast<const T*>(a.v_pool) + at;
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs];
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) {
      sums[c][i] = load(acc + c * padded + at + i * kLanes) * fades[c];
    }
  }
  int64_t t = seen.low;
  do {  // at least once: a loop that may be passed by would keep the sums in memory
    if (kAsks && t >= ahead->low && t < ahead->high) {
      ask<T>(a.k_pool, ahead->offsets[t], a.head_dim);
    }
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) {
      const T* from = pool + chunk.offsets[t] + i * kLanes;
      value[i] = part ? load_part(from, part) : load(from);
    }
    for (int c = 0; c < kUsed; ++c) {
      const float weight = weights[c * kChunk + t];
      for (int i = 0; i < kVecs; ++i) sums[c][i] += value[i] * weight;
    }
  } while (++t < seen.high);
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(acc + c * padded + at + i * kLanes, sums[c][i]);
  }
}

template <int kUsed, bool kAsks, class T>
JAXPAGE_INLINE void add_head(const Attention& a, const Chunk& chunk, Keys seen,
                             const Chunk* ahead, const float* weights, const float* fades,
                             float* acc) {
  const int64_t whole = a.head_dim / kLanes * kLanes;
  int64_t at = 0;
  if (kAsks) {  // once
    add_values<kUsed, kWide, true, T>(a, chunk, seen, ahead, weights, fades, acc, at, 0);
    at += kWide * kLanes;
  }
  for (; at + kWide * kLanes <= whole; at += kWide * kLanes) {
    add_values<kUsed, kWide, false, T>(a, chunk, seen, nullptr, weights, fades, acc, at, 0);
  }
  for (; at < whole; at += kLanes) {
    add_values<kUsed, 1, false, T>(a, chunk, seen, nullptr, weights, fades, acc, at, 0);
  }
  if (const int part = static_cast<int>(a.head_dim - at)) {
    add_values<kUsed, 1, false, T>(a, chunk, seen, nullptr, weights, fades, acc, at, part);
  }
}

// What a job's query vectors share: themselves, times the scale, and the present chunk's keys.
struct Inputs {
  float* q;       // [vectors, padded H]
  float* turned;  // [padded H, kChunk]
};

// The keys of a chunk that a job's query vector sees.
Keys seen_by(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t vector) {
  const int64_t position = job.first_position + (job.is_prefix ? 0 : vector / a.group);
  const int64_t oldest = position - a.window + 1 - chunk.base, newest = position - chunk.base;
  return {oldest > chunk.low ? oldest : chunk.low, newest < chunk.high ? newest + 1 : chunk.high};
}

// One chunk for `kUsed` query vectors, the first of which is vector `first` of the job. The keys of
// `ahead`, where there is one, are asked for.
template <int kUsed, class T>
void add_chunk(const Attention& a, const AttentionJob& job, const Chunk& chunk, const Chunk* ahead,
               int64_t first, const Inputs& in, State state) {
  const int64_t padded = padded_dim(a.head_dim);
  const float* q = in.q + first * padded;
  float* acc = state.acc + first * padded;
  const Keys oldest = seen_by(a, job, chunk, first);
  const Keys newest = seen_by(a, job, chunk, first + kUsed - 1);
  const Keys seen{oldest.low, newest.high};
  const bool asks = ahead && seen.low < seen.high && a.head_dim >= kWide * kLanes;
  if (seen.low < seen.high) {
    alignas(64) float scores[kUsed * kChunk];
    if (job.num_tokens * a.group <= kQueries) {
      score_few<kUsed, T>(a, chunk, seen, q, scores);
    } else {
      score_many<kUsed>(a, seen, in.turned, q, scores);
    }
    for (int c = 0; c < kUsed; ++c) {
      const Keys here = seen_by(a, job, chunk, first + c);
      if (here.low > 0 || here.high < kChunk) mask(scores + c * kChunk, here);
    }
    float fades[kUsed];
    weigh<kUsed>(scores, state.top + first, state.total + first, fades);
    if (asks) {
      add_head<kUsed, true, T>(a, chunk, seen, ahead, scores, fades, acc);
    } else {
      add_head<kUsed, false, T>(a, chunk, seen, nullptr, scores, fades, acc);
    }
  }
  if (ahead) ask_rest<T>(a, asks ? seen : Keys{0, 0}, *ahead);
}

void clear(State state, int64_t vectors, int64_t padded) {
  for (int64_t i = 0; i < vectors * padded; ++i) state.acc[i] = 0;
  for (int64_t i = 0; i < vectors; ++i) state.top[i] = kNothing, state.total[i] = 0;
}

// Adds a chunk to a state, for query vectors `first` .. `last` - 1 of a job.
template <int kUsed, class T>
void add_chunk_to_all(const Attention& a, const AttentionJob& job, const Chunk& chunk,
                      const Chunk* ahead, int64_t first, int64_t last, const Inputs& in,
                      State state) {
  for (; first + kUsed <= last; first += kUsed) {
    add_chunk<kUsed, T>(a, job, chunk, ahead, first, in, state);
    ahead = nullptr;
  }
  if constexpr (kUsed > 1) {
    if (first < last) add_chunk_to_all<kUsed - 1, T>(a, job, chunk, ahead, first, last, in, state);
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
    const int64_t token = job.tokens[v / a.group], head = job.kv_head * a.group + v % a.group;
    const float* __restrict acc = state.acc + v * padded;
    float* __restrict out = a.out + (token * num_heads + head) * a.head_dim;
    const float total = state.total[v] > kTiny ? state.total[v] : kTiny;  // of nothing: 0 / tiny
    for (int64_t i = 0; i < a.head_dim; ++i) out[i] = acc[i] / total;
  }
}

// Between a job's states and those of its tokens: what is summed of whole partitions, and of the
// one that is begun.
template <bool kOut>
void move_begun(const Attention& a, const AttentionJob& job, State state, State more) {
  const int64_t padded = padded_dim(a.head_dim);
  auto move = [](float* here, float* there, int64_t count) {
    __builtin_memcpy(kOut ? there : here, kOut ? here : there, count * sizeof(float));
  };
  for (int64_t i = 0; i < job.num_tokens; ++i) {
    const int64_t floats = state_floats(a.group, a.head_dim), first = i * a.group;
    const int64_t place = (job.tokens[i] * a.num_kv_heads + job.kv_head) * 2;
    for (int64_t part = 0; part < 2; ++part) {
      const State mine = part ? more : state;
      const State theirs(job.begun + (place + part) * floats, a.group, padded);
      move(mine.acc + first * padded, theirs.acc, a.group * padded);
      move(mine.top + first, theirs.top, a.group);
      move(mine.total + first, theirs.total, a.group);
    }
  }
}

void scale_queries(const Attention& a, const AttentionJob& job, float* q) {
  const int64_t padded = padded_dim(a.head_dim), num_heads = a.num_kv_heads * a.group;
  for (int64_t v = 0; v < job.num_tokens * a.group; ++v) {
    const int64_t token = job.tokens[v / a.group], head = job.kv_head * a.group + v % a.group;
    const float* __restrict from = a.q + (token * num_heads + head) * a.head_dim;
    float* __restrict to = q + v * padded;
    for (int64_t i = 0; i < a.head_dim; ++i) to[i] = from[i] * a.scale;
  }
}

// The next address that a vector may be loaded from in one go.
float* align(float* at) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
}

template <class T>
void attend_typed(const Attention& a, const AttentionJob& job, const AttentionJob* next_job,
                  float* scratch) {
  const int64_t padded = padded_dim(a.head_dim), vectors = job.num_tokens * a.group;
  const Inputs in{align(scratch), align(scratch) + vectors * padded};
  scale_queries(a, job, in.q);
  float* states = in.turned + padded * kChunk;
  State state(job.partial ? job.partial : states, vectors, padded);
  State more(align(states + state_floats(vectors, a.head_dim)), vectors, padded);
  const bool goes_on = job.begun && !job.is_prefix;
  goes_on ? move_begun<false>(a, job, state, more) : clear(more, vectors, padded);
  bool is_empty = !goes_on || job.first_chunk < kChunks;
  int64_t index = first_seen(a, job);
  Chunk chunk = locate(a, job, index), ahead = chunk;
  for (; index < job.last_chunk; chunk = ahead, ++index) {
    if (index % kChunks == 0) clear(more, vectors, padded);
    const bool is_last = index + 1 == job.last_chunk;
    if (!is_last) ahead = locate(a, job, index + 1);
    if (is_last && next_job) ahead = locate(a, *next_job, first_seen(a, *next_job));
    const Chunk* asked = is_last && !next_job ? nullptr : &ahead;
    if (vectors > kQueries) turn_keys<T>(a, chunk, in.turned);
    add_chunk_to_all<kQueries, T>(a, job, chunk, asked, 0, vectors, in, more);
    const bool is_whole = (index + 1) % kChunks == 0;
    if (!is_whole && (job.is_prefix || !is_last)) continue;
    if (is_empty) {
      __builtin_memcpy(state.acc, more.acc, state_floats(vectors, a.head_dim) * sizeof(float));
    } else {
      merge_states(state, more, vectors, padded);
    }
    is_empty = false;
  }
  if (job.is_prefix) {
    move_begun<true>(a, job, state, more);
  } else if (!job.partial) {
    write_out(a, job, state);
  }
}

}  // namespace

namespace jaxpage::JAXPAGE_SET {

void attend(const Attention& a, bool is_bfloat16, const AttentionJob& job, const AttentionJob* next,
            float* scratch) {
  (is_bfloat16 ? attend_typed<BFloat16> : attend_typed<float>)(a, job, next, scratch);
}

void merge(const Attention& a, const AttentionJob& job, const float* partials, float* scratch) {
  const int64_t padded = padded_dim(a.head_dim), vectors = job.num_tokens * a.group;
  const int64_t floats = state_floats(vectors, a.head_dim);
  __builtin_memcpy(scratch, partials, floats * sizeof(float));
  State state(scratch, vectors, padded);
  const int64_t parts = (job.last_chunk + kChunks - 1) / kChunks - job.first_chunk / kChunks;
  for (int64_t p = 1; p < parts; ++p) {
    const State more(const_cast<float*>(partials) + p * floats, vectors, padded);
    merge_states(state, more, vectors, padded);
  }
  write_out(a, job, state);
}

}  // namespace jaxpage::JAXPAGE_SET
