// Attention over a paged pool: one function for decode, prefill and mixed steps.
#include "attention_scores.h"

namespace {

using namespace jaxpage;

constexpr float kTiny = 1.17549435e-38f;
constexpr int64_t kChunks = kPartition / kChunk;

// One KV head of a job: where its keys and values lie in the first token of the pools, and what
// belongs to its query vectors.
template <class T>
struct Head {
  const T *keys, *values;
  const float* q;  // [vectors, padded H], times the scale
  float* scores;   // [vectors, kChunk], then weights
  State state;     // of the present partition
  void go_on(int64_t head_dim, int64_t vectors) {
    keys += head_dim, values += head_dim;
    q += vectors * padded_dim(head_dim), scores += vectors * kChunk;
    state.skip(vectors, padded_dim(head_dim));
  }
};

// What is asked for while keys are scored, and while values are summed.
struct Asked {
  Ahead values, keys;
};

// While the keys of a chunk are scored its values are asked for, and while these are summed, the
// keys of the chunk `ahead`, of job `owner` if there is one.
template <class T>
Asked plan_asking(const Attention& a, const AttentionJob& job, const Chunk& chunk,
                  const AttentionJob* owner, const Chunk& ahead) {
  const int64_t live = chunk.high - chunk.low, wide = kWide * kLanes;
  const int64_t columns = a.head_dim < kLanes ? 1 : a.head_dim / kLanes;
  const int64_t tiles = (vectors_of_head(a, job) + kQueries - 1) / kQueries;
  const int64_t scored = job.num_heads * ((live + kLanes - 1) / kLanes) * columns;
  const int64_t summed = job.num_heads * tiles * ((a.head_dim + wide - 1) / wide) * live;
  const T *keys = static_cast<const T*>(a.k_pool), *values = static_cast<const T*>(a.v_pool);
  return {Ahead(values, chunk, job.num_heads * a.head_dim, scored),
          owner ? Ahead(keys, ahead, owner->num_heads * a.head_dim, summed) : Ahead()};
}

// acc = acc * fade + weights . V over the keys `seen`, for `kUsed` queries and `kVecs` vectors of a
// head, from `at` on.
template <int kUsed, int kVecs, class T>
JAXPAGE_INLINE void add_values(const Attention& a, const Chunk& chunk, Keys seen, const T* values,
                               Ahead& ahead, const float* weights, const float* fades, float* acc,
                               int64_t at, int part) {
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs];
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) {
      sums[c][i] = load(acc + c * padded + at + i * kLanes) * fades[c];
    }
  }
  Ahead asked = ahead;  // a copy stays in registers
  int64_t t = seen.low;
  do {  // at least once: a loop that may be passed by would keep the sums in memory
    asked.ask();
    Vec value[kVecs];
    for (int i = 0; i < kVecs; ++i) {
      const T* from = values + chunk.offsets[t] + at + i * kLanes;
      value[i] = part ? load_part(from, part) : load(from);
    }
    for (int c = 0; c < kUsed; ++c) {
      const Vec weight = splat(weights[c * kChunk + t]);
      for (int i = 0; i < kVecs; ++i) sums[c][i] = multiply_add(value[i], weight, sums[c][i]);
    }
  } while (++t < seen.high);
  ahead = asked;
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(acc + c * padded + at + i * kLanes, sums[c][i]);
  }
}

template <int kUsed, class T>
JAXPAGE_INLINE void add_head(const Attention& a, const Chunk& chunk, Keys seen, const T* values,
                             Ahead& ahead, const float* weights, const float* fades, float* acc) {
  const int64_t whole = a.head_dim / kLanes * kLanes;
  int64_t at = 0;
  for (; at + kWide * kLanes <= whole; at += kWide * kLanes) {
    add_values<kUsed, kWide>(a, chunk, seen, values, ahead, weights, fades, acc, at, 0);
  }
  for (; at < whole; at += kLanes) {
    add_values<kUsed, 1>(a, chunk, seen, values, ahead, weights, fades, acc, at, 0);
  }
  if (const int part = static_cast<int>(a.head_dim - at)) {
    add_values<kUsed, 1>(a, chunk, seen, values, ahead, weights, fades, acc, at, part);
  }
}

// The keys of a chunk that a query vector of a head sees.
Keys seen_by(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t vector) {
  const int64_t position = job.first_position + (job.is_prefix ? 0 : vector / a.group);
  const int64_t oldest = position - a.window + 1 - chunk.base, newest = position - chunk.base;
  return {oldest > chunk.low ? oldest : chunk.low, newest < chunk.high ? newest + 1 : chunk.high};
}

// Keys that any of `count` query vectors of a head sees, from `first` on.
Keys seen_by_tile(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
                  int64_t count) {
  return {seen_by(a, job, chunk, first).low, seen_by(a, job, chunk, first + count - 1).high};
}

// Scores of `kUsed` query vectors of a head, from `first` on. `turned`: the chunk's keys as
// columns, or nullptr for a tile that is the only one.
template <int kUsed, class T>
void score(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
           const Head<T>& head, const float* turned, Ahead& ahead) {
  const Keys seen = seen_by_tile(a, job, chunk, first, kUsed);
  if (seen.low >= seen.high) return;
  const float* q = head.q + first * padded_dim(a.head_dim);
  float* scores = head.scores + first * kChunk;
  if (turned) {
    score_many<kUsed>(a, seen, turned, q, scores);
  } else {
    score_few<kUsed>(a, chunk, seen, head.keys, ahead, q, scores);
  }
  for (int c = 0; c < kUsed; ++c) {
    const Keys here = seen_by(a, job, chunk, first + c);
    if (here.low > 0 || here.high < kChunk) mask(scores + c * kChunk, here);
  }
}

// Adds the values of a chunk, by their scores, to the states of `kUsed` query vectors of a head.
template <int kUsed, class T>
void sum_up(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
            const Head<T>& head, Ahead& ahead) {
  const Keys seen = seen_by_tile(a, job, chunk, first, kUsed);
  if (seen.low >= seen.high) return;
  State state = head.state;
  state.skip(first, padded_dim(a.head_dim));
  float* scores = head.scores + first * kChunk;
  float fades[kUsed];
  weigh<kUsed>(scores, state.top, state.total, fades);
  add_head<kUsed>(a, chunk, seen, head.values, ahead, scores, fades, state.acc);
}

// Calls use(first, a constant) for tiles of kUsed and then of fewer query vectors.
template <int kUsed, class Use>
JAXPAGE_INLINE void for_tiles(int64_t first, int64_t last, Use use) {
  for (; first + kUsed <= last; first += kUsed) use(first, std::integral_constant<int, kUsed>{});
  if constexpr (kUsed > 1) {
    if (first < last) for_tiles<kUsed - 1>(first, last, use);
  }
}

// Adds a chunk to the states of a job: first all heads' scores, then all heads' values, so that
// memory is read in the order it lies in. `turned`: room for a head's keys as columns.
template <class T>
void add_chunk(const Attention& a, const AttentionJob& job, const Chunk& chunk, Head<T> head,
               float* turned, Asked asked) {
  const int64_t vectors = vectors_of_head(a, job);
  const Head<T> first_head = head;
  if (vectors <= kQueries) turned = nullptr;
  for (int64_t i = 0; i < job.num_heads; ++i, head.go_on(a.head_dim, vectors)) {
    if (turned) turn_keys(a, chunk, head.keys, asked.values, turned);
    for_tiles<kQueries>(0, vectors, [&](int64_t first, auto used) {
      score<used>(a, job, chunk, first, head, turned, asked.values);
    });
  }
  asked.values.ask_rest();
  head = first_head;
  for (int64_t i = 0; i < job.num_heads; ++i, head.go_on(a.head_dim, vectors)) {
    for_tiles<kQueries>(0, vectors, [&](int64_t first, auto used) {
      sum_up<used>(a, job, chunk, first, head, asked.keys);
    });
  }
  asked.keys.ask_rest();
}

// Where a job's query vector lies in q and out.
int64_t locate_vector(const Attention& a, const AttentionJob& job, int64_t vector) {
  const int64_t of_head = vectors_of_head(a, job), inside = vector % of_head;
  const int64_t token = job.tokens[inside / a.group], kv_head = job.kv_head + vector / of_head;
  return ((token * a.num_kv_heads + kv_head) * a.group + inside % a.group) * a.head_dim;
}

void write_out(const Attention& a, const AttentionJob& job, State state) {
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t v = 0; v < num_vectors(a, job); ++v) {
    const float* __restrict acc = state.acc + v * padded;
    float* __restrict out = a.out + locate_vector(a, job, v);
    const float total = state.total[v] > kTiny ? state.total[v] : kTiny;  // of nothing: 0 / tiny
    for (int64_t i = 0; i < a.head_dim; ++i) out[i] = acc[i] / total;
  }
}

// Between a job's states and those of its tokens: what is summed of whole partitions, and of the
// one that is begun.
template <bool kOut>
void move_begun(const Attention& a, const AttentionJob& job, State state, State more) {
  const int64_t padded = padded_dim(a.head_dim), floats = state_floats(a.group, a.head_dim);
  auto move = [](float* here, float* there, int64_t count) {
    __builtin_memcpy(kOut ? there : here, kOut ? here : there, count * sizeof(float));
  };
  for (int64_t i = 0; i < job.num_heads * job.num_tokens; ++i) {
    const int64_t token = job.tokens[i % job.num_tokens];
    const int64_t kv_head = job.kv_head + i / job.num_tokens, first = i * a.group;
    const int64_t place = (token * a.num_kv_heads + kv_head) * 2;
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
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t v = 0; v < num_vectors(a, job); ++v) {
    const float* __restrict from = a.q + locate_vector(a, job, v);
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
  const int64_t padded = padded_dim(a.head_dim), vectors = num_vectors(a, job);
  float* q = align(scratch);
  float* turned = q + vectors * padded;
  float* scores = turned + padded * kChunk;
  float* states = scores + vectors * kChunk;
  scale_queries(a, job, q);
  State state(job.partial ? job.partial : states, vectors, padded);
  State more(align(states + state_floats(vectors, a.head_dim)), vectors, padded);
  const Head<T> head{static_cast<const T*>(a.k_pool), static_cast<const T*>(a.v_pool), q, scores,
                     more};
  const bool goes_on = job.begun && !job.is_prefix;
  goes_on ? move_begun<false>(a, job, state, more) : clear(more, vectors, padded);
  bool is_empty = !goes_on || job.first_chunk < kChunks;
  int64_t index = first_seen(a, job);
  Chunk chunk = locate(a, job, index), ahead = chunk;
  for (; index < job.last_chunk; chunk = ahead, ++index) {
    if (index % kChunks == 0) clear(more, vectors, padded);
    const bool is_last = index + 1 == job.last_chunk;
    const AttentionJob* owner = is_last ? next_job : &job;
    if (owner) ahead = locate(a, *owner, is_last ? first_seen(a, *owner) : index + 1);
    add_chunk(a, job, chunk, head, turned, plan_asking<T>(a, job, chunk, owner, ahead));
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
  const int64_t padded = padded_dim(a.head_dim), vectors = num_vectors(a, job);
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
