// What the kernels compute, one job at a time, and the table of them for the processor at hand.
// A job is what one thread does without waiting for another; ffi*.cpp cut calls into jobs.
#pragma once

#include <cstdint>

namespace jaxpage {

// y[m, o] = sum over d of x[m, d] * w[o, d]
struct Product {
  const float* x;     // [num_rows, size]
  const void* w;      // [num_outputs, size], float or bfloat16
  float* y;           // [num_rows, num_outputs]
  int64_t num_rows, num_outputs, size;
};

// Products of up to kFewRows rows, and of more, add in another order each. Their jobs are multiples
// of so many outputs, which whole panels of any set fill.
constexpr int64_t kFewRows = 64;
constexpr int64_t kFewOutputs = 12;
constexpr int64_t kManyOutputs = 32;

// What a job multiplies: outputs first .. last - 1 of rows first_row .. last_row - 1. Outputs up to
// `asked`, which the same thread will most likely take next, may be read ahead.
struct ProductPart {
  int64_t first, last, asked, first_row, last_row;
};

// y[t] = x[t] / sqrt(mean of x[t]^2 + eps) * scale
struct Norm {
  const float* x;      // [T, size]
  const float* scale;  // [size]
  float* y;            // [T, size]
  int64_t size;
  float eps;
};

// y[t, f] = silu(x[t, f]) * x[t, size + f]
struct Gate {
  const float* x;  // [T, 2 * size]
  float* y;        // [T, size]
  int64_t size;
};

// A token's queries, key and value of each KV head, lying behind each other, taken apart; pairs
// (i, i + H / 2) of queries and keys turned by the token's angles.
struct Rotation {
  const float* qkv;  // [T, K, group + 2, H]
  const float *cos, *sin;  // [T, H / 2]
  float* q;                // [T, K * group, H]
  float *k, *v;            // [T, K, H]
  int64_t num_kv_heads, group, head_dim;
};

// Of each row the index of its largest entry (the first of equals; a NaN is larger than any) and
// the logarithm of the sum of exp(x).
struct Logits {
  const float* x;      // [R, size]
  int32_t* largest;    // [R]
  float* log_sum_exp;  // [R]
  int64_t size;
};

// Queries of `row` against its keys in the pool. T tokens, N query heads, K KV heads, G = N / K.
struct Attention {
  const float* q;               // [T, N, H]
  const void* k_pool;           // [P, S, K, H], float or bfloat16
  const void* v_pool;           // the same shape
  const int32_t* block_tables;  // [B, M]
  float* out;                   // [T, N, H]
  int64_t num_blocks, block_size, num_kv_heads, group, head_dim, table_width;
  int64_t window;  // positions a query sees, its own included
  float scale;
};

// Keys are read kChunk at a time. A row's softmax is kept per kPartition keys, counted from
// position 0, and merged in order: the result is the same to the bit however jobs are cut.
constexpr int64_t kChunk = 64;
constexpr int64_t kPartition = 256;
constexpr int64_t kMostVectors = 64;  // query vectors (query tokens x query heads) of a job

// An online softmax (FlashAttention, Dao et al. 2022, algorithm 1) of `vectors` queries in one
// array: weighted sums of V [vectors, padded H], then largest scores and sums of weights.
inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t state_floats(int64_t vectors, int64_t head_dim) {
  return vectors * (padded_dim(head_dim) + 2);
}
// Query vectors, a head's turned keys and all scores of a chunk, two states, and room to align.
inline int64_t scratch_floats(int64_t vectors, int64_t head_dim) {
  return (vectors + kChunk) * padded_dim(head_dim) + vectors * kChunk +
         2 * state_floats(vectors, head_dim) + 48;
}

// What a job leaves for another to go on from: for each of its tokens the sum of the partitions
// that are whole and the one that is begun, two states of `group` vectors.
struct AttentionJob {
  int64_t row;                 // whose table is read
  int64_t kv_head, num_heads;  // the first KV head and how many; a token's heads lie side by side
  const int32_t* tokens;   // of q, num_tokens of them
  int64_t first_position;  // of the first token in its sequence; the others follow it
  int64_t num_tokens;
  int64_t first_chunk, last_chunk;  // the latter excluded
  float* partial;   // nullptr: write to out. Else one state, for a job of one partition.
  float* begun;     // nullptr, or the states [T, K, 2] of what was summed before first_chunk
  bool is_prefix;   // leave `begun` for others, which go on from last_chunk
};

// Query vectors of a job: head by head, token by token.
inline int64_t vectors_of_head(const Attention& a, const AttentionJob& job) {
  return job.num_tokens * a.group;
}
inline int64_t num_vectors(const Attention& a, const AttentionJob& job) {
  return job.num_heads * vectors_of_head(a, job);
}

struct Kernels {
  void (*product_few)(const Product&, bool is_bfloat16, const ProductPart&);
  // columns: size * kManyOutputs floats of the job's own, aligned to 64 bytes.
  void (*product_many)(const Product&, bool is_bfloat16, const ProductPart&, float* columns);
  void (*norm)(const Norm&, int64_t first, int64_t last);    // rows
  void (*gate)(const Gate&, int64_t first, int64_t last);    // rows
  void (*rotate)(const Rotation&, int64_t first, int64_t last);  // tokens
  void (*summarise)(const Logits&, int64_t first, int64_t last);  // rows
  // `next` or nullptr: what the same thread will most likely do next, to read ahead.
  void (*attend)(const Attention&, bool is_bfloat16, const AttentionJob&, const AttentionJob* next,
                 float* scratch);
  // The states of a job's partitions, one after the other, as the job's rows of out.
  void (*merge)(const Attention&, const AttentionJob&, const float* partials, float* scratch);
};

// The best for this processor, or those that jaxpage_choose_set has chosen.
const Kernels& kernels();

}  // namespace jaxpage

// Every source of kernels is compiled once for each set of instructions, into its own namespace.
#define JAXPAGE_DECLARE(set)                                                                  \
  namespace jaxpage::set {                                                                    \
  void product_few(const Product&, bool, const ProductPart&);                                 \
  void product_many(const Product&, bool, const ProductPart&, float*);                        \
  void norm(const Norm&, int64_t, int64_t);                                                   \
  void gate(const Gate&, int64_t, int64_t);                                                   \
  void rotate(const Rotation&, int64_t, int64_t);                                             \
  void summarise(const Logits&, int64_t, int64_t);                                            \
  void attend(const Attention&, bool, const AttentionJob&, const AttentionJob*, float*);      \
  void merge(const Attention&, const AttentionJob&, const float*, float*);                    \
  }

JAXPAGE_DECLARE(portable)
#if defined(__x86_64__)
JAXPAGE_DECLARE(avx2)
JAXPAGE_DECLARE(avx512)
#endif
