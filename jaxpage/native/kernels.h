// What the kernels compute, one job at a time, and the table of them for the processor at hand.
// A job is what one thread does without waiting for another; ffi.cpp cuts calls into jobs.
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

// Queries of `row` against its keys in the pool. T tokens, N query heads, K KV heads, G = N / K.
struct Attention {
  const float* q;      // [T, N, H]
  const void* k_pool;  // [P, S, K, H], float or bfloat16
  const void* v_pool;  // the same shape
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
constexpr int64_t kMostVectors = 64;  // query vectors (query tokens x group) that a job holds

struct AttentionJob {
  int64_t row, kv_head;
  int64_t first_token;     // of q
  int64_t first_position;  // of that token in its sequence
  int64_t num_tokens;
  int64_t first_partition, last_partition;  // the latter excluded
  float* partial;  // nullptr: write to out. Else one state, for a job of one partition.
};

// An online softmax (FlashAttention, Dao et al. 2022, algorithm 1) of `vectors` queries in one
// array: weighted sums of V [vectors, padded H], then largest scores and sums of weights.
inline int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
inline int64_t state_floats(int64_t vectors, int64_t head_dim) {
  return vectors * (padded_dim(head_dim) + 2);
}
inline int64_t scratch_floats(int64_t vectors, int64_t head_dim) {
  return vectors * (padded_dim(head_dim) + kChunk) + 2 * state_floats(vectors, head_dim) + 16;
}

struct Kernels {
  // Outputs first_output .. last_output - 1 of all rows.
  void (*product)(const Product&, bool is_bfloat16, int64_t first_output, int64_t last_output);
  void (*attend)(const Attention&, bool is_bfloat16, const AttentionJob&, float* scratch);
  // The states of a job's partitions, one after the other, as the job's rows of out.
  void (*merge)(const Attention&, const AttentionJob&, const float* partials, float* scratch);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512;
#endif

}  // namespace jaxpage
