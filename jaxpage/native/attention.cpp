// Attention over a paged pool: one function for decode, prefill and mixed steps. A job goes through
// its chunks of keys in order; of each it computes the scores of all its query vectors, in tiles of
// kQueries, and then adds the values by their weights.
#include "attention_scores.h"

namespace {

using namespace jaxpage;

constexpr float kTiny = 1.17549435e-38f;  // the smallest normal float
constexpr int64_t kChunks = kPartition / kChunk;  // chunks of a partition

// One KV head of a job, and the `vectors` query vectors that attend to it.
template <class T>
struct Head {
  const T *keys, *values;  // the pools; a chunk's offsets are counted from here
  const float* q;          // [vectors, padded H], times the scale
  float* scores;           // [vectors, kChunk], then weights
  State state;             // of the present partition
  void go_to_next(int64_t head_dim, int64_t vectors) {
    keys += head_dim, values += head_dim;
    q += vectors * padded_dim(head_dim), scores += vectors * kChunk;
    state.skip(vectors, padded_dim(head_dim));
  }
};

// What to prefetch for a chunk: its values while its keys are scored, and the keys of the next
// chunk while its values are summed.
struct Prefetchers {
  Prefetcher values, next_keys;
};

// next_chunk belongs to next_job, which may be the same job; nullptr where nothing comes next.
template <class T>
Prefetchers plan_prefetch(const Attention& a, const AttentionJob& job, const Chunk& chunk,
                          const AttentionJob* next_job, const Chunk& next_chunk) {
  const int64_t live = chunk.high - chunk.low, wide = kWide * kLanes;
  const int64_t columns = a.head_dim < kLanes ? 1 : a.head_dim / kLanes;
  const int64_t tiles = (vectors_of_head(a, job) + kQueries - 1) / kQueries;
  const int64_t scored = job.num_heads * ((live + kLanes - 1) / kLanes) * columns;
  const int64_t summed = job.num_heads * tiles * ((a.head_dim + wide - 1) / wide) * live;
  const T *keys = static_cast<const T*>(a.k_pool), *values = static_cast<const T*>(a.v_pool);
  return {Prefetcher(values, chunk, job.num_heads * a.head_dim, scored),
          next_job ? Prefetcher(keys, next_chunk, next_job->num_heads * a.head_dim, summed)
                   : Prefetcher()};
}

// acc = acc * rescale + weights . V over the keys `seen`: kUsed query vectors, and kVecs vectors of
// the head's entries from `at` on. part: 0, or how many entries the only vector has.
template <int kUsed, int kVecs, class T>
JAXPAGE_INLINE void add_values(const Attention& a, const Chunk& chunk, Keys seen, const T* values,
                               Prefetcher& prefetcher, const float* weights, const float* rescale,
                               float* acc, int64_t at, int part) {
  const int64_t padded = padded_dim(a.head_dim);
  Vec sums[kUsed][kVecs];
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) {
      sums[c][i] = load(acc + c * padded + at + i * kLanes) * rescale[c];
    }
  }
  Prefetcher local = prefetcher;  // a copy stays in registers
  int64_t t = seen.low;
  do {  // at least once: a loop that may be passed by would keep the sums in memory
    local.step();
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
  prefetcher = local;
  for (int c = 0; c < kUsed; ++c) {
    for (int i = 0; i < kVecs; ++i) store(acc + c * padded + at + i * kLanes, sums[c][i]);
  }
}

// add_values over all entries of the head.
template <int kUsed, class T>
JAXPAGE_INLINE void add_head(const Attention& a, const Chunk& chunk, Keys seen, const T* values,
                             Prefetcher& prefetcher, const float* weights, const float* rescale,
                             float* acc) {
  const int64_t whole = a.head_dim / kLanes * kLanes;
  int64_t at = 0;
  for (; at + kWide * kLanes <= whole; at += kWide * kLanes) {
    add_values<kUsed, kWide>(a, chunk, seen, values, prefetcher, weights, rescale, acc, at, 0);
  }
  for (; at < whole; at += kLanes) {
    add_values<kUsed, 1>(a, chunk, seen, values, prefetcher, weights, rescale, acc, at, 0);
  }
  if (const int part = static_cast<int>(a.head_dim - at)) {
    add_values<kUsed, 1>(a, chunk, seen, values, prefetcher, weights, rescale, acc, at, part);
  }
}

// The keys of a chunk that a query vector of a head sees.
Keys seen_by(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t vector) {
  const int64_t position = job.first_position + (job.is_prefix ? 0 : vector / a.group);
  const int64_t oldest = position - a.window + 1 - chunk.base, newest = position - chunk.base;
  return {oldest > chunk.low ? oldest : chunk.low, newest < chunk.high ? newest + 1 : chunk.high};
}

// The keys of a chunk that any of `count` query vectors of a head sees, from `first` on.
Keys seen_by_tile(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
                  int64_t count) {
  return {seen_by(a, job, chunk, first).low, seen_by(a, job, chunk, first + count - 1).high};
}

// Scores of kUsed query vectors of a head, from `first` on. transposed: the chunk's keys
// [H, kChunk], or nullptr for a tile that is the only one.
template <int kUsed, class T>
void score(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
           const Head<T>& head, const float* transposed, Prefetcher& prefetcher) {
  const Keys seen = seen_by_tile(a, job, chunk, first, kUsed);
  if (seen.low >= seen.high) return;
  const float* q = head.q + first * padded_dim(a.head_dim);
  float* scores = head.scores + first * kChunk;
  if (transposed) {
    score_many<kUsed>(a, seen, transposed, q, scores);
  } else {
    score_few<kUsed>(a, chunk, seen, head.keys, prefetcher, q, scores);
  }
  for (int c = 0; c < kUsed; ++c) {
    const Keys here = seen_by(a, job, chunk, first + c);
    if (here.low > 0 || here.high < kChunk) mask(scores + c * kChunk, here);
  }
}

// Adds the values of a chunk, weighted by their scores, to the state of kUsed query vectors of a
// head, from `first` on.
template <int kUsed, class T>
void add_weighted(const Attention& a, const AttentionJob& job, const Chunk& chunk, int64_t first,
                  const Head<T>& head, Prefetcher& prefetcher) {
  const Keys seen = seen_by_tile(a, job, chunk, first, kUsed);
  if (seen.low >= seen.high) return;
  State state = head.state;
  state.skip(first, padded_dim(a.head_dim));
  float* scores = head.scores + first * kChunk;
  float rescale[kUsed];
  weigh<kUsed>(scores, state.max, state.sum, rescale);
  add_head<kUsed>(a, chunk, seen, head.values, prefetcher, scores, rescale, state.acc);
}

// Cuts query vectors first .. last - 1 into tiles of kUsed and, at the end, one of fewer: calls
// use(first, size) for each, where the size is a constant to the compiler.
template <int kUsed, class Use>
JAXPAGE_INLINE void for_tiles(int64_t first, int64_t last, Use use) {
  for (; first + kUsed <= last; first += kUsed) use(first, std::integral_constant<int, kUsed>{});
  if constexpr (kUsed > 1) {
    if (first < last) for_tiles<kUsed - 1>(first, last, use);
  }
}

// Adds a chunk to the states of a job: first all heads' scores, then all heads' values, so that
// memory is read in the order it lies in. transposed: room for a head's keys, [H, kChunk].
template <class T>
void add_chunk(const Attention& a, const AttentionJob& job, const Chunk& chunk, Head<T> head,
               float* transposed, Prefetchers prefetchers) {
  const int64_t vectors = vectors_of_head(a, job);
  const Head<T> first_head = head;
  if (vectors <= kQueries) transposed = nullptr;
  for (int64_t i = 0; i < job.num_heads; ++i, head.go_to_next(a.head_dim, vectors)) {
    if (transposed) transpose_keys(a, chunk, head.keys, prefetchers.values, transposed);
    for_tiles<kQueries>(0, vectors, [&](int64_t first, auto used) {
      score<used>(a, job, chunk, first, head, transposed, prefetchers.values);
    });
  }
  prefetchers.values.finish();
  head = first_head;
  for (int64_t i = 0; i < job.num_heads; ++i, head.go_to_next(a.head_dim, vectors)) {
    for_tiles<kQueries>(0, vectors, [&](int64_t first, auto used) {
      add_weighted<used>(a, job, chunk, first, head, prefetchers.next_keys);
    });
  }
  prefetchers.next_keys.finish();
}

// Where a job's query vector lies in q and out, in floats.
int64_t locate_vector(const Attention& a, const AttentionJob& job, int64_t vector) {
  const int64_t of_head = vectors_of_head(a, job), inside = vector % of_head;
  const int64_t token = job.tokens[inside / a.group], kv_head = job.kv_head + vector / of_head;
  return ((token * a.num_kv_heads + kv_head) * a.group + inside % a.group) * a.head_dim;
}

// out = acc / sum; 0 where no key was seen.
void write_out(const Attention& a, const AttentionJob& job, State state) {
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t v = 0; v < num_vectors(a, job); ++v) {
    const float* __restrict acc = state.acc + v * padded;
    float* __restrict out = a.out + locate_vector(a, job, v);
    const float sum = state.sum[v] > kTiny ? state.sum[v] : kTiny;  // of no key: 0 / tiny
    for (int64_t i = 0; i < a.head_dim; ++i) out[i] = acc[i] / sum;
  }
}

// Copies the states of a job, `whole` of the complete partitions and `partition` of the one under
// way, to its carry (kSave) or from there.
template <bool kSave>
void copy_carry(const Attention& a, const AttentionJob& job, State whole, State partition) {
  const int64_t padded = padded_dim(a.head_dim), floats = state_floats(a.group, a.head_dim);
  auto copy = [](float* here, float* there, int64_t count) {
    __builtin_memcpy(kSave ? there : here, kSave ? here : there, count * sizeof(float));
  };
  for (int64_t i = 0; i < job.num_heads * job.num_tokens; ++i) {
    const int64_t token = job.tokens[i % job.num_tokens];
    const int64_t kv_head = job.kv_head + i / job.num_tokens, first = i * a.group;
    const int64_t place = (token * a.num_kv_heads + kv_head) * 2;
    for (int64_t part = 0; part < 2; ++part) {
      const State here = part ? partition : whole;
      const State there(job.carry + (place + part) * floats, a.group, padded);
      copy(here.acc + first * padded, there.acc, a.group * padded);
      copy(here.max + first, there.max, a.group);
      copy(here.sum + first, there.sum, a.group);
    }
  }
}

// q [vectors, padded H] = the job's query vectors times the scale. What pads them is not written.
void scale_queries(const Attention& a, const AttentionJob& job, float* q) {
  const int64_t padded = padded_dim(a.head_dim);
  for (int64_t v = 0; v < num_vectors(a, job); ++v) {
    const float* __restrict from = a.q + locate_vector(a, job, v);
    float* __restrict to = q + v * padded;
    for (int64_t i = 0; i < a.head_dim; ++i) to[i] = from[i] * a.scale;
  }
}

// The next address that is a multiple of 64 bytes, where a vector of any set may begin.
float* align(float* at) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
}

// One job over pools of T. Its state is `whole`, to which each partition is added once it is
// complete; `partition` is that of the partition under way.
template <class T>
void attend_typed(const Attention& a, const AttentionJob& job, const AttentionJob* next_job,
                  float* scratch) {
  const int64_t padded = padded_dim(a.head_dim), vectors = num_vectors(a, job);
  float* q = align(scratch);
  float* transposed = q + vectors * padded;
  float* scores = transposed + padded * kChunk;
  float* states = scores + vectors * kChunk;
  scale_queries(a, job, q);
  State whole(job.partial ? job.partial : states, vectors, padded);
  State partition(align(states + state_floats(vectors, a.head_dim)), vectors, padded);
  const Head<T> head{static_cast<const T*>(a.k_pool), static_cast<const T*>(a.v_pool), q, scores,
                     partition};
  const bool resumes = job.carry && !job.is_prefix;
  resumes ? copy_carry<false>(a, job, whole, partition) : clear(partition, vectors, padded);
  bool is_empty = !resumes || job.first_chunk < kChunks;  // no partition is in `whole` yet
  int64_t index = first_seen(a, job);
  Chunk chunk = locate(a, job, index), next_chunk = chunk;
  for (; index < job.last_chunk; chunk = next_chunk, ++index) {
    if (index % kChunks == 0) clear(partition, vectors, padded);
    const bool is_last = index + 1 == job.last_chunk;
    const AttentionJob* owner = is_last ? next_job : &job;  // of next_chunk
    if (owner) next_chunk = locate(a, *owner, is_last ? first_seen(a, *owner) : index + 1);
    add_chunk(a, job, chunk, head, transposed,
              plan_prefetch<T>(a, job, chunk, owner, next_chunk));
    const bool is_complete = (index + 1) % kChunks == 0;
    if (!is_complete && (job.is_prefix || !is_last)) continue;
    if (is_empty) {
      __builtin_memcpy(whole.acc, partition.acc,
                       state_floats(vectors, a.head_dim) * sizeof(float));
    } else {
      merge_states(whole, partition, vectors, padded);
    }
    is_empty = false;
  }
  if (job.is_prefix) {
    copy_carry<true>(a, job, whole, partition);
  } else if (!job.partial) {
    write_out(a, job, whole);
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
