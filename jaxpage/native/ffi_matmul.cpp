// The custom call of matrix products: chooses the kernel and cuts the call into jobs.
#include <algorithm>
#include <memory>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxpage;

namespace {

// Of matmul_few, bytes of w a job: so few that all threads end at about the same time.
constexpr int64_t kFewBytes = 1 << 16;
// Of matmul_many, bytes of x a job, which stay in the second level of cache, and the fewest rows a
// job, with which transposing w still pays.
constexpr int64_t kManyBytes = 1'400'000;
constexpr int64_t kFewestRows = 48;

// whole / part, rounded up.
int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

void multiply_few(ffi::ThreadPool& pool, const Matmul& p, bool is_bfloat16) {
  const int64_t row_bytes = p.size * (is_bfloat16 ? 2 : 4);
  const int64_t panels = std::max<int64_t>(kFewBytes / row_bytes / kFewOutputs, 1);
  const int64_t outputs = panels * kFewOutputs;
  parallel_for(pool, ceil_div(p.num_outputs, outputs), [&](int64_t job, int64_t, bool is_next) {
    const int64_t first = job * outputs, last = std::min(first + outputs, p.num_outputs);
    const int64_t prefetch_end = is_next ? std::min(last + outputs, p.num_outputs) : last;
    kernels().matmul_few(p, is_bfloat16, {first, last, prefetch_end, 0, p.num_rows});
  });
}

// Rows a job of matmul_many: as many as stay in cache, cut evenly; fewer where the threads would
// have too few jobs.
int64_t rows_of_many(const Matmul& p, int64_t workers) {
  const int64_t panels = ceil_div(p.num_outputs, kManyOutputs);
  const int64_t row_bytes = p.size * static_cast<int64_t>(sizeof(float));
  const int64_t fit = std::max(kManyBytes / row_bytes, kFewestRows);
  const int64_t wanted = std::max(ceil_div(p.num_rows, fit), ceil_div(4 * workers, panels));
  const int64_t blocks = std::min(wanted, ceil_div(p.num_rows, kFewestRows));
  return ceil_div(ceil_div(p.num_rows, blocks), 12) * 12;  // whole tiles
}

void multiply_many(ffi::ThreadPool& pool, const Matmul& p, bool is_bfloat16) {
  const int64_t workers = num_workers(pool), rows = rows_of_many(p, workers);
  const int64_t panels = ceil_div(p.num_outputs, kManyOutputs), floats = p.size * kManyOutputs;
  const std::unique_ptr<float[]> columns(new float[workers * floats + 16]);
  void* start = columns.get();
  std::size_t space = (workers * floats + 16) * sizeof(float);
  float* aligned = static_cast<float*>(std::align(64, workers * floats * sizeof(float), start,
                                                  space));
  auto work = [&](int64_t job, int64_t worker, bool is_next_mine) {
    const int64_t first = job % panels * kManyOutputs, row = job / panels * rows;
    const int64_t last = std::min(first + kManyOutputs, p.num_outputs);
    const int64_t prefetch_end =
        is_next_mine ? std::min(last + kManyOutputs, p.num_outputs) : last;
    kernels().matmul_many(p, is_bfloat16,
                          {first, last, prefetch_end, row, std::min(row + rows, p.num_rows)},
                          aligned + worker * floats);
  };
  parallel_for(pool, ceil_div(p.num_rows, rows) * panels, work);
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::ResultBuffer<ffi::F32> y) {
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  const bool is_bfloat16 = w.element_type() == ffi::BF16;
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] != ws[1] ||
      ys[0] != xs[0] || ys[1] != ws[0] || (w.element_type() != ffi::F32 && !is_bfloat16)) {
    return ffi::Error::InvalidArgument(
        "wanted x [M, D], w [O, D] in float32 or bfloat16 and y [M, O]");
  }
  const Matmul p{x.typed_data(), w.untyped_data(), y->typed_data(), xs[0], ws[0], xs[1]};
  if (p.num_rows == 0 || p.num_outputs == 0) return ffi::Error::Success();
  if (p.size == 0) {  // sums of nothing
    std::fill_n(p.y, p.num_rows * p.num_outputs, 0.0f);
    return ffi::Error::Success();
  }
  (p.num_rows > kFewRows ? multiply_many : multiply_few)(pool, p, is_bfloat16);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
