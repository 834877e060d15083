// XLA custom calls of the kernels in rowwise.cpp, and the choice of the set of instructions for all
// kernels. kernels.py has checked the shapes; they are checked here again, because with a wrong one
// a kernel would read beyond an array.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxpage;

namespace {

// The kernels compiled for one set of instructions.
struct Set {
  const char* name;
  bool runs_here;
  Kernels kernels;
};

#define JAXPAGE_SET_OF(set, runs_here)                                              \
  Set {                                                                             \
    #set, runs_here, {                                                              \
      set::matmul_few, set::matmul_many, set::rms_norm, set::swiglu, set::rope_qkv, \
          set::argmax_logsumexp, set::attend, set::merge                            \
    }                                                                               \
  }

// The best set first; the last runs on every processor.
const Set kSets[] = {
#if defined(__x86_64__)
    JAXPAGE_SET_OF(avx512,
                   __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")),
    JAXPAGE_SET_OF(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")),
#endif
    JAXPAGE_SET_OF(portable, true),
};

std::atomic<const Set*> chosen{
    std::find_if(std::begin(kSets), std::end(kSets), [](const Set& set) { return set.runs_here; })};

using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

// Calls work(first, last) for rows first .. last - 1, in jobs of about 4,000 numbers: fewer are not
// worth a thread.
template <class Work>
void for_rows(ffi::ThreadPool& pool, int64_t num_rows, int64_t size, const Work& work) {
  const int64_t rows = size < 4096 ? 4096 / (size < 1 ? 1 : size) : 1;
  parallel_for(pool, (num_rows + rows - 1) / rows, [&](int64_t job, int64_t, bool) {
    const int64_t end = (job + 1) * rows;
    work(job * rows, end < num_rows ? end : num_rows);
  });
}

ffi::Error rms_norm(ffi::ThreadPool pool, Floats x, Floats scale, Result y, float eps) {
  const auto xs = x.dimensions();
  if (xs.size() != 2 || static_cast<int64_t>(scale.element_count()) != xs[1] ||
      y->element_count() != x.element_count()) {
    return ffi::Error::InvalidArgument("wanted x [T, D], scale [D] and y [T, D]");
  }
  const RmsNorm n{x.typed_data(), scale.typed_data(), y->typed_data(), xs[1], eps};
  for_rows(pool, xs[0], xs[1], [&](int64_t a, int64_t b) { kernels().rms_norm(n, a, b); });
  return ffi::Error::Success();
}

ffi::Error swiglu(ffi::ThreadPool pool, Floats x, Result y) {
  const auto xs = x.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ys.size() != 2 || xs[0] != ys[0] || xs[1] != 2 * ys[1]) {
    return ffi::Error::InvalidArgument("wanted x [T, 2 F] and y [T, F]");
  }
  const Swiglu s{x.typed_data(), y->typed_data(), ys[1]};
  for_rows(pool, xs[0], xs[1], [&](int64_t a, int64_t b) { kernels().swiglu(s, a, b); });
  return ffi::Error::Success();
}

ffi::Error rope_qkv(ffi::ThreadPool pool, Floats qkv, Floats cos, Floats sin, Result q, Result k,
                    Result v) {
  const auto from = qkv.dimensions();  // [T, K, G + 2, H]
  const auto angles = static_cast<int64_t>(cos.element_count());
  if (from.size() != 4 || from[2] < 3 || from[3] % 2 || angles != from[0] * from[3] / 2 ||
      sin.element_count() != cos.element_count() || k->element_count() != v->element_count() ||
      static_cast<int64_t>(k->element_count()) != from[0] * from[1] * from[3] ||
      static_cast<int64_t>(q->element_count()) != from[0] * from[1] * (from[2] - 2) * from[3]) {
    return ffi::Error::InvalidArgument(
        "wanted qkv [T, K, G + 2, H], cos and sin [T, H / 2], q [T, K G, H], k and v [T, K, H]");
  }
  if (v->element_count() == 0) return ffi::Error::Success();  // and none of q and k
  const RopeQkv r{qkv.typed_data(), cos.typed_data(), sin.typed_data(), q->typed_data(),
                  k->typed_data(),  v->typed_data(),  from[1],          from[2] - 2,
                  from[3]};
  const int64_t size = from[1] * from[2] * from[3];
  for_rows(pool, from[0], size, [&](int64_t a, int64_t b) { kernels().rope_qkv(r, a, b); });
  return ffi::Error::Success();
}

ffi::Error argmax_logsumexp(ffi::ThreadPool pool, Floats x, ffi::ResultBuffer<ffi::S32> argmax,
                            Result logsumexp) {
  const auto xs = x.dimensions();
  if (xs.size() != 2 || static_cast<int64_t>(argmax->element_count()) != xs[0] ||
      static_cast<int64_t>(logsumexp->element_count()) != xs[0]) {
    return ffi::Error::InvalidArgument("wanted x [R, V], argmax [R] and logsumexp [R]");
  }
  const ArgmaxLogsumexp l{x.typed_data(), argmax->typed_data(), logsumexp->typed_data(), xs[1]};
  for_rows(pool, xs[0], xs[1], [&](int64_t a, int64_t b) { kernels().argmax_logsumexp(l, a, b); });
  return ffi::Error::Success();
}

}  // namespace

const Kernels& jaxpage::kernels() { return chosen.load(std::memory_order_relaxed)->kernels; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxpage_swiglu, swiglu, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_rope_qkv, rope_qkv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_argmax_logsumexp, argmax_logsumexp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<Floats>());

// Equals INTERFACE in library.py. Raise both when a call gets another name, or takes or gives
// anything else.
extern "C" int jaxpage_interface() { return 6; }

extern "C" const char* jaxpage_instruction_set() { return chosen.load()->name; }

// For tests: from now on all calls use this set. Returns 0, and changes nothing, where this
// processor or this build lacks it.
extern "C" int jaxpage_choose_set(const char* name) {
  for (const Set& set : kSets) {
    if (set.runs_here && !std::strcmp(set.name, name)) return chosen = &set, 1;
  }
  return 0;
}
