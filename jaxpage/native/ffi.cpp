// XLA custom calls over the kernels: checks shapes, cuts a call into jobs, runs them.
// Python (kernels.py) has checked what a user can get wrong; what is refused here says what.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxpage;

namespace {

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")
          ? kAvx512
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? kAvx2
                                                                          : kPortable;
  return best;
#else
  return kPortable;
#endif
}

using Shape = ffi::Span<const int64_t>;

bool same(Shape a, Shape b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

bool is_weight(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

ffi::Error product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                   ffi::ResultBuffer<ffi::F32> y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] != ws[1] || xs[1] < 1 ||
      ys[0] != xs[0] || ys[1] != ws[0] || !is_weight(w.element_type())) {
    return ffi::Error::InvalidArgument(
        "wanted x [M, D], w [O, D] in float32 or bfloat16 and y [M, O]");
  }
  const Product p{x.typed_data(), w.untyped_data(), y->typed_data(), xs[0], ws[0], xs[1]};
  // Jobs of a few hundred kilobytes of w: long streams, and enough of them to share out evenly.
  const int64_t bytes = p.size * (w.element_type() == ffi::F32 ? 4 : 2);
  int64_t outputs = (int64_t{1} << 18) / (bytes > 0 ? bytes : 1);
  const int64_t even = p.num_outputs / (4 * num_workers(pool));
  outputs = (outputs < even ? outputs : even) / 8 * 8;  // whole panels
  if (outputs < 8) outputs = 8;
  const bool is_bfloat16 = w.element_type() == ffi::BF16;
  parallel_for(pool, (p.num_outputs + outputs - 1) / outputs, [&](int64_t job, int64_t) {
    const int64_t end = (job + 1) * outputs;
    kernels().product(p, is_bfloat16, job * outputs, end < p.num_outputs ? end : p.num_outputs);
  });
  return ffi::Error::Success();
}

// Tiles of up to kMostVectors query vectors of one row and KV head. The last tiles of a prompt,
// which see most keys, come first.
std::vector<AttentionJob> cut_jobs(const Attention& a, const int32_t* context_lens,
                                   const int32_t* query_starts, int64_t num_rows,
                                   int64_t num_tokens) {
  std::vector<AttentionJob> jobs;
  const int64_t tile = a.group < kMostVectors ? kMostVectors / a.group : 1;
  const int64_t most = a.table_width * a.block_size;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t context = context_lens[row] < most ? context_lens[row] : most;
    const int64_t begin = query_starts[row] > 0 ? query_starts[row] : 0;
    const int64_t end = query_starts[row + 1] < num_tokens ? query_starts[row + 1] : num_tokens;
    const int64_t count = end - begin;
    if (context <= 0 || count <= 0 || count > context) continue;
    for (int64_t skip = (count - 1) / tile * tile; skip >= 0; skip -= tile) {
      const int64_t tokens = count - skip < tile ? count - skip : tile;
      const int64_t position = context - count + skip;
      const int64_t oldest = position - a.window + 1;
      const int64_t first = (oldest > 0 ? oldest : 0) / kPartition;
      const int64_t last = (position + tokens + kPartition - 1) / kPartition;
      for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        jobs.push_back({row, head, begin + skip, position, tokens, first, last, nullptr});
      }
    }
  }
  return jobs;
}

using Floats = std::unique_ptr<float[]>;  // not initialised

void run_jobs(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16,
              const std::vector<AttentionJob>& jobs) {
  int64_t vectors = 1;
  for (const auto& job : jobs) vectors = std::max(vectors, job.num_tokens * a.group);
  const int64_t floats = scratch_floats(vectors, a.head_dim);
  const Floats scratch(new float[num_workers(pool) * floats]);
  parallel_for(pool, jobs.size(), [&](int64_t job, int64_t worker) {
    kernels().attend(a, is_bfloat16, jobs[job], scratch.get() + worker * floats);
  });
}

// Few jobs over many keys: a job a partition, its state kept, and all merged at the end.
void run_split(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16,
               const std::vector<AttentionJob>& jobs) {
  std::vector<int64_t> starts;
  int64_t needed = 0, vectors = 1;
  for (const auto& job : jobs) {
    starts.push_back(needed);
    vectors = std::max(vectors, job.num_tokens * a.group);
    needed += (job.last_partition - job.first_partition) *
              state_floats(job.num_tokens * a.group, a.head_dim);
  }
  const Floats partials(new float[needed]);
  std::vector<AttentionJob> parts;
  for (size_t i = 0; i < jobs.size(); ++i) {
    AttentionJob part = jobs[i];
    part.partial = partials.get() + starts[i];
    for (int64_t p = jobs[i].first_partition; p < jobs[i].last_partition; ++p) {
      part.first_partition = p, part.last_partition = p + 1;
      parts.push_back(part);
      part.partial += state_floats(part.num_tokens * a.group, a.head_dim);
    }
  }
  run_jobs(pool, a, is_bfloat16, parts);
  const Floats scratch(new float[scratch_floats(vectors, a.head_dim)]);
  for (size_t i = 0; i < jobs.size(); ++i) {
    kernels().merge(a, jobs[i], partials.get() + starts[i], scratch.get());
  }
}

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer k,
                     ffi::AnyBuffer v, ffi::Buffer<ffi::S32> block_tables,
                     ffi::Buffer<ffi::S32> context_lens, ffi::Buffer<ffi::S32> query_starts,
                     ffi::ResultBuffer<ffi::F32> out, float scale, int64_t window) {
  const auto qs = q.dimensions(), ks = k.dimensions(), vs = v.dimensions();
  const auto bs = block_tables.dimensions();
  if (qs.size() != 3 || ks.size() != 4 || bs.size() != 2 || !same(ks, vs) || qs[2] != ks[3] ||
      ks[2] == 0 || qs[1] % ks[2] != 0 || !same(out->dimensions(), qs) || ks[0] == 0 ||
      ks[1] == 0 ||
      k.element_type() != v.element_type() || !is_weight(k.element_type()) ||
      static_cast<int64_t>(context_lens.element_count()) != bs[0] ||
      static_cast<int64_t>(query_starts.element_count()) != bs[0] + 1) {
    return ffi::Error::InvalidArgument(
        "wanted q [T, N, H], k and v [P, S, K, H] in float32 or bfloat16, N a multiple of K, "
        "block_tables [B, M], context_lens [B], query_starts [B + 1]");
  }
  const Attention a{q.typed_data(), k.untyped_data(), v.untyped_data(), block_tables.typed_data(),
                    out->typed_data(), ks[0], ks[1], ks[2], qs[1] / ks[2], qs[2], bs[1], window,
                    scale};
  std::memset(a.out, 0, q.size_bytes());  // padding tokens and empty rows stay so
  const auto jobs = cut_jobs(a, context_lens.typed_data(), query_starts.typed_data(), bs[0], qs[0]);
  int64_t longest = 0;
  for (const auto& job : jobs) {
    longest = std::max(longest, job.last_partition - job.first_partition);
  }
  const bool is_bfloat16 = k.element_type() == ffi::BF16;
  if (longest > 1 && static_cast<int64_t>(jobs.size()) < 8 * num_workers(pool)) {
    run_split(pool, a, is_bfloat16, jobs);
  } else {
    run_jobs(pool, a, is_bfloat16, jobs);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));

// What kernels.py calls INTERFACE: raised when a function here takes or gives anything else.
extern "C" int jaxpage_interface() { return 1; }

extern "C" const char* jaxpage_instruction_set() {
#if defined(__x86_64__)
  return &kernels() == &kAvx512 ? "avx512" : &kernels() == &kAvx2 ? "avx2" : "portable";
#else
  return "portable";
#endif
}
