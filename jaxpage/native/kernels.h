// The kernels: what each takes, one job at a time, and the table of them for the processor at hand.
// A job is a piece of a call that one thread computes alone; ffi*.cpp cut calls into jobs.
#pragma once

#include <cstdint>

namespace jaxpage {

// y[m, o] = sum over d of x[m, d] * w[o, d]. A call; MatmulPart is one job of it.
struct Matmul {
  const float* x;     // [num_rows, size]
  const void* w;      // [num_outputs, size], float or bfloat16
  float* y;           // [num_rows, num_outputs]
  int64_t num_rows, num_outputs, size;
};

// matmul_few takes up to kFewRows rows, matmul_many more; each adds in an order of its own. A job
// has a multiple of kFewOutputs, or of kManyOutputs, which every set's panels of outputs divide.
constexpr int64_t kFewRows = 64;
constexpr int64_t kFewOutputs = 12;
constexpr int64_t kManyOutputs = 32;

// One job: outputs first .. last - 1 of rows first_row .. last_row - 1. Most likely the same thread
// computes outputs last .. prefetch_end - 1 next: their rows of w may be prefetched meanwhile.
struct MatmulPart {
  int64_t first, last, prefetch_end, first_row, last_row;
};

// y[t, d] = x[t, d] / sqrt(mean over d of x[t, d]^2 + eps) * scale[d]
struct RmsNorm {
  const float* x;      // [T, size]
  const float* scale;  // [size]
  float* y;            // [T, size]
  int64_t size;
  float eps;
};

// y[t, f] = silu(x[t, f]) * x[t, size + f]
struct Swiglu {
  const float* x;  // [T, 2 * size]
  float* y;        // [T, size]
  int64_t size;
};

// Splits qkv, which holds the `group` queries, the key and the value of each KV head one after the
// other, and applies rotary positions to queries and keys: entries i and i + H / 2 are two
// coordinates, rotated by angle i of the token.
struct RopeQkv {
  const float* qkv;        // [T, K, group + 2, H]
  const float *cos, *sin;  // [T, H / 2]
  float* q;                // [T, K * group, H]
  float *k, *v;            // [T, K, H]
  int64_t num_kv_heads, group, head_dim;
};

// Of each row the index of its largest entry (the first of equals; a NaN is larger than any) and
// the natural logarithm of the sum of exp(x).
struct ArgmaxLogsumexp {
  const float* x;    // [R, size]
  int32_t* argmax;   // [R]
  float* logsumexp;  // [R]
  int64_t size;
};

// Causal attention of a step's queries to the keys and values in the pool, those of the step
// included. T tokens, B rows, M blocks of a table, P blocks of S slots in the pool, N query heads,
// K KV heads, `group` = N / K query heads a KV head, H numbers a head.
struct Attention {
  const float* q;               // [T, N, H]
  const void* k_pool;           // [P, S, K, H], float or bfloat16
  const void* v_pool;           // the same shape
  const int32_t* block_tables;  // [B, M]
  float* out;                   // [T, N, H]
  int64_t num_blocks, block_size, num_kv_heads, group, head_dim, table_width;
  int64_t window;  // how many positions a query sees, its own included
  float scale;     // of the scores, q . k
};

// A chunk is kChunk keys, read together. A partition is kPartition keys with a softmax of its own;
// both are counted from position 0 of the row. A row's partitions are merged in their order, so the
// result is the same to the bit however the row is cut into jobs.
constexpr int64_t kChunk = 64;
constexpr int64_t kPartition = 256;
// A query vector is one query head of one token. So many of a KV head make a full job.
constexpr int64_t kMostVectors = 64;

// A state is the online softmax (FlashAttention, Dao et al. 2022, algorithm 1) of `vectors` query
// vectors in one array of floats: the weighted sums of V [vectors, padded H], then the largest
// scores [vectors] and the sums of weights [vectors].
inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t state_floats(int64_t vectors, int64_t head_dim) {
  return vectors * (padded_dim(head_dim) + 2);
}
// What a job needs to compute in: its scaled query vectors, a chunk's keys of one head, transposed,
// the scores of a chunk, two states, and room to align them.
inline int64_t scratch_floats(int64_t vectors, int64_t head_dim) {
  return (vectors + kChunk) * padded_dim(head_dim) + vectors * kChunk +
         2 * state_floats(vectors, head_dim) + 48;
}

// One job: some tokens of a row, and some of its KV heads, against some of the row's chunks.
// A job over a prefix that rows share takes one token of each of those rows, and leaves its sums in
// `carry`, where the job of each row finds them: for every token and KV head two states of `group`
// vectors, that of the whole partitions so far and that of the partition it stopped in.
struct AttentionJob {
  int64_t row;                 // the row whose block table is read
  int64_t kv_head, num_heads;  // the first KV head and how many; a token's heads lie side by side
  const int32_t* tokens;       // [num_tokens] indices of q
  int64_t first_position;      // in its row of the first token, which the others follow; for a
                               // prefix its length, as all tokens come after it
  int64_t num_tokens;
  int64_t first_chunk, last_chunk;  // the latter excluded
  float* partial;                   // nullptr: write to out. Else the state of its one partition
  float* carry;    // nullptr, or the states [T, K, 2] of the keys before first_chunk
  bool is_prefix;  // write `carry`, for jobs that resume from last_chunk, and not out
};

// How many query vectors a job has. They are in the order KV head, token, query head.
inline int64_t vectors_of_head(const Attention& a, const AttentionJob& job) {
  return job.num_tokens * a.group;
}
inline int64_t num_vectors(const Attention& a, const AttentionJob& job) {
  return job.num_heads * vectors_of_head(a, job);
}

struct Kernels {
  void (*matmul_few)(const Matmul&, bool is_bfloat16, const MatmulPart&);
  // columns: room for a panel of w, transposed: size * kManyOutputs floats, aligned to 64 bytes,
  // that no other job uses meanwhile.
  void (*matmul_many)(const Matmul&, bool is_bfloat16, const MatmulPart&, float* columns);
  // Rows (or tokens) first .. last - 1 of the call.
  void (*rms_norm)(const RmsNorm&, int64_t first, int64_t last);
  void (*swiglu)(const Swiglu&, int64_t first, int64_t last);
  void (*rope_qkv)(const RopeQkv&, int64_t first, int64_t last);
  void (*argmax_logsumexp)(const ArgmaxLogsumexp&, int64_t first, int64_t last);
  // next: the job that the same thread will most likely do next, to prefetch its keys; or nullptr.
  // scratch: scratch_floats(num_vectors(job), H) floats that no other job uses meanwhile.
  void (*attend)(const Attention&, bool is_bfloat16, const AttentionJob&, const AttentionJob* next,
                 float* scratch);
  // Merges the states of a job's partitions, which lie one after the other, into its part of out.
  void (*merge)(const Attention&, const AttentionJob&, const float* partials, float* scratch);
};

// The best set of kernels for this processor, or the one that jaxpage_choose_set has chosen.
const Kernels& kernels();

}  // namespace jaxpage

// Each source of kernels is compiled once for each set of instructions, into a namespace named so.
#define JAXPAGE_DECLARE(set)                                                             \
  namespace jaxpage::set {                                                               \
  void matmul_few(const Matmul&, bool, const MatmulPart&);                               \
  void matmul_many(const Matmul&, bool, const MatmulPart&, float*);                      \
  void rms_norm(const RmsNorm&, int64_t, int64_t);                                       \
  void swiglu(const Swiglu&, int64_t, int64_t);                                          \
  void rope_qkv(const RopeQkv&, int64_t, int64_t);                                       \
  void argmax_logsumexp(const ArgmaxLogsumexp&, int64_t, int64_t);                       \
  void attend(const Attention&, bool, const AttentionJob&, const AttentionJob*, float*); \
  void merge(const Attention&, const AttentionJob&, const float*, float*);               \
  }

JAXPAGE_DECLARE(portable)
#if defined(__x86_64__)
JAXPAGE_DECLARE(avx2)
JAXPAGE_DECLARE(avx512)
#endif
