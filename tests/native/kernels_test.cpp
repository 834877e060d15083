// Calls every kernel as XLA does, with random shapes, threads and sets of instructions: against
// double precision within a bound, and to the bit against the same rows in another batch.
// Arguments: rounds and a seed, or the name of a fault that a sanitizer has to find.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "runtime.h"

extern "C" {
XLA_FFI_Handler jaxpage_matmul, jaxpage_rms_norm, jaxpage_swiglu, jaxpage_rope_qkv,
    jaxpage_argmax_logsumexp, jaxpage_attention;
int jaxpage_choose_set(const char* name);
}

namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
using Dims = std::vector<int64_t>;

constexpr double kUnit = 1.0 / (1 << 24);  // what rounding to a float changes, relative to it
constexpr double kSmall = 1e-36;           // results below may lose all digits
constexpr int64_t kFewRows = 64;           // of native.FEW_ROWS

std::mt19937_64 random_bits;
ThreadPool* pools[4];
const char* set_name = "";
int64_t num_checks = 0;

int64_t pick(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_bits);
}
bool chance(int percent) { return pick(1, 100) <= percent; }
ThreadPool& any_pool() { return *pools[pick(0, 3)]; }

Floats normal(int64_t count, float spread = 1) {
  std::normal_distribution<float> draw(0, spread);
  Floats made(count);
  for (float& each : made) each = draw(random_bits);
  return made;
}

[[noreturn]] void fail(const char* what, int64_t place, double got, double wanted, double bound) {
  std::printf("WRONG %s with %s at %lld: got %.9g, wanted %.9g within %.3g\n", what, set_name,
              static_cast<long long>(place), got, wanted, bound);
  std::exit(1);
}

void check(const char* what, int64_t place, double got, double wanted, double bound) {
  ++num_checks;
  if (!(std::fabs(got - wanted) <= bound + kSmall)) fail(what, place, got, wanted, bound);
}

// Checks that `part` equals `whole` from `first` on, to the bit.
void check_bits(const char* what, const Floats& part, const Floats& whole, int64_t first) {
  for (size_t i = 0; i < part.size(); ++i, ++num_checks) {
    if (std::memcmp(&part[i], &whole[first + i], sizeof(float))) {
      fail(what, first + i, part[i], whole[first + i], 0);
    }
  }
}

void run(Call& call, XLA_FFI_Handler* handler, ThreadPool& pool) {
  const std::string refused = call.run(handler, pool);
  if (refused.empty()) return;
  std::printf("REFUSED with %s: %s\n", set_name, refused.c_str());
  std::exit(1);
}

// Runs both at once, as two programs of a process may.
template <class First, class Second>
void together(First first, Second second) {
  std::thread other(second);
  first();
  other.join();
}

template <class T>
std::vector<T> cut(const std::vector<T>& all, int64_t first, int64_t last) {
  return {all.begin() + first, all.begin() + last};
}

// A buffer of the numbers as floats, or as bfloat16; then `values` become what those stand for.
Buffer weights_of(Floats& values, Dims dims, bool is_bfloat16) {
  if (!is_bfloat16) return Buffer::of(values, std::move(dims));
  std::vector<uint16_t> halves;
  for (float& value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    halves.push_back(static_cast<uint16_t>(bits >> 16));
    bits &= 0xffff0000u;
    std::memcpy(&value, &bits, sizeof bits);
  }
  return Buffer::of(halves, std::move(dims));
}

Floats matmul(const Floats& x, const Buffer& w, int64_t rows, ThreadPool& pool) {
  const int64_t outputs = w.dims[0], size = w.dims[1];
  const Buffer y = Buffer::of(Floats(rows * outputs, NAN), {rows, outputs});
  const Buffer from = Buffer::of(x, {rows, size});
  run(Call().takes(from).takes(w).gives(y), jaxpage_matmul, pool);
  return y.values<float>();
}

void try_matmul() {
  const bool is_many = chance(30);
  const int64_t rows = is_many ? pick(kFewRows + 1, 150) : pick(0, chance(90) ? 40 : kFewRows);
  const int64_t outputs = pick(0, 70), size = pick(0, chance(80) ? 100 : 1400);
  const Floats x = normal(rows * size);
  Floats values = normal(outputs * size);
  const Buffer w = weights_of(values, {outputs, size}, chance(40));
  const int64_t first = pick(0, is_many ? rows - kFewRows - 1 : rows);
  const int64_t last = pick(is_many ? first + kFewRows + 1 : first, rows);
  const Floats some = cut(x, first * size, last * size);
  ThreadPool &one = any_pool(), &two = any_pool();
  Floats whole, part;
  together([&] { whole = matmul(x, w, rows, one); },
           [&] { part = matmul(some, w, last - first, two); });
  check_bits("matmul of another batch", part, whole, first * outputs);
  for (int64_t place = 0; place < rows * outputs; ++place) {
    double sum = 0, sizes = 0;
    for (int64_t i = 0; i < size; ++i) {
      const double term = double(x[place / outputs * size + i]) *
                          values[place % outputs * size + i];
      sum += term, sizes += std::fabs(term);
    }
    check("matmul", place, whole[place], sum, (size + 8) * kUnit * sizes);
  }
}

void try_rms_norm() {
  const int64_t rows = pick(0, 50), size = pick(0, 300), first = pick(0, rows);
  const float eps = 1e-5f;
  const Floats x = normal(rows * size), scale = normal(size);
  auto rms_norm = [&](const Floats& from, int64_t count, ThreadPool& pool) {
    const Buffer y = Buffer::of(Floats(from.size(), NAN), {count, size});
    const Buffer given = Buffer::of(from, {count, size}), by = Buffer::of(scale, {size});
    run(Call().takes(given).takes(by).gives(y).attr("eps", eps), jaxpage_rms_norm, pool);
    return y.values<float>();
  };
  const Floats whole = rms_norm(x, rows, any_pool());
  const Floats some = cut(x, first * size, rows * size);
  check_bits("rms_norm of another batch", rms_norm(some, rows - first, any_pool()), whole,
             first * size);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += std::pow(double(x[row * size + i]), 2);
    const double root = std::sqrt(squares / size + eps);
    for (int64_t i = 0; i < size; ++i) {
      const double wanted = x[row * size + i] / root * scale[i];
      check("rms_norm", row * size + i, whole[row * size + i], wanted,
            (size + 16) * kUnit * std::fabs(wanted));
    }
  }
}

void try_swiglu() {
  const int64_t rows = pick(0, 40), size = pick(0, 200), first = pick(0, rows);
  const Floats x = normal(rows * 2 * size, chance(50) ? 1.0f : 40.0f);
  auto swiglu = [&](const Floats& from, int64_t count, ThreadPool& pool) {
    const Buffer y = Buffer::of(Floats(count * size, NAN), {count, size});
    const Buffer given = Buffer::of(from, {count, 2 * size});
    run(Call().takes(given).gives(y), jaxpage_swiglu, pool);
    return y.values<float>();
  };
  const Floats whole = swiglu(x, rows, any_pool());
  const Floats some = cut(x, first * 2 * size, rows * 2 * size);
  check_bits("swiglu of another batch", swiglu(some, rows - first, any_pool()), whole,
             first * size);
  for (int64_t place = 0; place < rows * size; ++place) {
    const int64_t at = place / size * 2 * size + place % size;
    const double wanted = x[at] / (1 + std::exp(-double(x[at]))) * x[at + size];
    check("swiglu", place, whole[place], wanted, 16 * kUnit * std::fabs(wanted) + 1e-30);
  }
}

void try_rope_qkv() {
  const int64_t tokens = pick(0, 30), heads = pick(1, 4), group = pick(1, 5), half = pick(0, 70);
  const int64_t size = 2 * half, many = group + 2;
  const Floats qkv = normal(tokens * heads * many * size);
  Floats cos = normal(tokens * half), sin = normal(tokens * half);
  const Buffer from = Buffer::of(qkv, {tokens, heads, many, size});
  const Buffer c = Buffer::of(cos, {tokens, half}), s = Buffer::of(sin, {tokens, half});
  const int64_t of_kv = tokens * heads * size;
  const Buffer q = Buffer::of(Floats(of_kv * group, NAN), {tokens, heads * group, size});
  const Buffer k = Buffer::of(Floats(of_kv, NAN), {tokens, heads, size});
  const Buffer v = Buffer::of(Floats(of_kv, NAN), {tokens, heads, size});
  run(Call().takes(from).takes(c).takes(s).gives(q).gives(k).gives(v), jaxpage_rope_qkv,
      any_pool());
  const Floats queries = q.values<float>(), keys = k.values<float>(), values = v.values<float>();
  for (int64_t place = 0; place < tokens * heads * many * half; ++place) {
    const int64_t i = place % half, which = place / half % many, head = place / half / many;
    const int64_t at = place / half * size + i, angle = head / heads * half + i;
    const bool is_value = which == group + 1;
    const double x = qkv[at], y = qkv[at + half], co = is_value ? 1 : cos[angle],
                 si = is_value ? 0 : sin[angle];
    const Floats& got = is_value ? values : which == group ? keys : queries;
    const int64_t to = (which < group ? head * group + which : head) * size + i;
    const double bound = 3 * kUnit * (std::fabs(x) + std::fabs(y)) *
                         (std::fabs(co) + std::fabs(si));
    check("rope_qkv", to, got[to], x * co - y * si, bound);
    check("rope_qkv", to + half, got[to + half], y * co + x * si, bound);
  }
}

void try_argmax_logsumexp() {
  const int64_t rows = pick(0, 20), size = pick(1, 700), first = pick(0, rows);
  Floats x = normal(rows * size, 9);
  for (int64_t i = 0; i < rows * size; ++i) {
    if (chance(2)) x[i] = -INFINITY;
  }
  auto argmax_logsumexp = [&](const Floats& from, int64_t count, ThreadPool& pool, Ints& largest) {
    const Buffer to = Buffer::of(Ints(count), {count});
    const Buffer y = Buffer::of(Floats(count, NAN), {count});
    const Buffer given = Buffer::of(from, {count, size});
    run(Call().takes(given).gives(to).gives(y), jaxpage_argmax_logsumexp, pool);
    largest = to.values<int32_t>();
    return y.values<float>();
  };
  Ints places, others;
  const Floats whole = argmax_logsumexp(x, rows, any_pool(), places);
  const Floats some = cut(x, first * size, rows * size);
  check_bits("logsumexp of another batch",
             argmax_logsumexp(some, rows - first, any_pool(), others), whole, first);
  for (int64_t row = 0; row < rows; ++row) {
    const auto from = x.begin() + row * size;
    const auto most = std::max_element(from, from + size);
    check("argmax", row, places[row], most - from, 0);
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += std::exp(double(from[i]) - *most);
    if (std::isinf(*most)) continue;
    const double wanted = *most + std::log(sum);
    check("logsumexp", row, whole[row], wanted,
          kUnit * (size + 32 + 4 * std::fabs(wanted)));
  }
}

// The rows of a step over a pool: what the call of attention takes.
struct Step {
  int64_t heads, group, size, block_size, num_blocks, width, window;
  bool is_bfloat16, shares;
  Floats q, k, v, keys, values;  // keys, values: the pools as floats
  Ints slots, tables, lens, starts;
  int64_t num_rows() const { return static_cast<int64_t>(lens.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(slots.size()); }
  float scale() const { return 1 / std::sqrt(static_cast<float>(size)); }
  int64_t block(int64_t row, int64_t position) const {
    const int64_t named = tables[row * width + position / block_size];
    return std::min(std::max<int64_t>(named, 0), num_blocks - 1);
  }
  int64_t place(int64_t row, int64_t position, int64_t head) const {
    return ((block(row, position) * block_size + position % block_size) * heads + head) * size;
  }
};

Step any_step() {
  Step s{};
  s.heads = pick(1, 3), s.group = chance(5) ? 70 : pick(1, 9), s.size = pick(1, 130);
  s.block_size = pick(1, 20), s.num_blocks = pick(1, 60);
  s.window = chance(30) ? pick(1, 400) : int64_t{1} << 40;
  s.is_bfloat16 = chance(40), s.shares = chance(70);
  const int64_t rows = pick(0, chance(20) ? 24 : 6), longest = chance(60) ? 90 : 700;
  s.starts.push_back(0);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = pick(0, longest), fed = chance(60) ? 1 : pick(0, 40);
    s.lens.push_back(static_cast<int32_t>(length));
    s.starts.push_back(s.starts.back() + static_cast<int32_t>(std::min(fed, length)));
    s.width = std::max(s.width, (length + s.block_size - 1) / s.block_size);
  }
  for (int64_t i = 0; i < rows * s.width; ++i) {
    s.tables.push_back(static_cast<int32_t>(pick(-1, s.num_blocks)));
  }
  const int64_t shared = chance(60) ? pick(0, s.width) : 0;
  for (int64_t i = 0; i < rows * s.width; ++i) {
    if (i % s.width < shared && i / s.width % 3 < 2) s.tables[i] = s.tables[i % s.width];
  }
  const int64_t tokens = s.starts.back() + pick(0, 3), slots = s.num_blocks * s.block_size;
  std::set<int64_t> taken;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = pick(-2, slots + 2);
    const bool is_free = slot < 0 || slot >= slots || taken.insert(slot).second;
    s.slots.push_back(static_cast<int32_t>(is_free ? slot : 1 << 30));
  }
  s.q = normal(tokens * s.heads * s.group * s.size);
  s.k = normal(tokens * s.heads * s.size), s.v = normal(tokens * s.heads * s.size);
  s.keys = normal(slots * s.heads * s.size), s.values = normal(slots * s.heads * s.size);
  return s;
}

// Calls attention; the step's pools become those that it leaves.
Floats attend(Step& s, ThreadPool& pool) {
  const int64_t tokens = s.num_tokens(), query_heads = s.heads * s.group;
  const Dims of_pool{s.num_blocks, s.block_size, s.heads, s.size};
  const Buffer q = Buffer::of(s.q, {tokens, query_heads, s.size});
  const Buffer k = Buffer::of(s.k, {tokens, s.heads, s.size});
  const Buffer v = Buffer::of(s.v, {tokens, s.heads, s.size});
  const Buffer keys = weights_of(s.keys, of_pool, s.is_bfloat16);
  const Buffer values = weights_of(s.values, of_pool, s.is_bfloat16);
  const Buffer slots = Buffer::of(s.slots, {tokens});
  const Buffer tables = Buffer::of(s.tables, {s.num_rows(), s.width});
  const Buffer lens = Buffer::of(s.lens, {s.num_rows()});
  const Buffer starts = Buffer::of(s.starts, {s.num_rows() + 1});
  const Buffer out = Buffer::of(Floats(s.q.size(), NAN), q.dims);
  Call call;
  call.takes(q).takes(k).takes(v).takes(keys).takes(values).takes(slots).takes(tables);
  call.takes(lens).takes(starts).gives(out).gives(keys).gives(values);
  call.attr("scale", s.scale()).attr("shares_prefixes", s.shares).attr("window", s.window);
  run(call, jaxpage_attention, pool);
  auto read = [&](const Buffer& from, Floats& to) {
    if (!s.is_bfloat16) return void(to = from.values<float>());
    const auto halves = from.values<uint16_t>();
    for (size_t i = 0; i < to.size(); ++i) {
      const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
      std::memcpy(&to[i], &bits, sizeof bits);
    }
  };
  read(keys, s.keys), read(values, s.values);
  return out.values<float>();
}

// Each token's slot holds its own numbers, rounded to the pool's type.
void check_stored(const Step& s) {
  const int64_t size = s.heads * s.size;
  const double bound = s.is_bfloat16 ? 1.0 / 256 : 0;
  for (int64_t t = 0; t < s.num_tokens(); ++t) {
    if (s.slots[t] < 0 || s.slots[t] >= s.num_blocks * s.block_size) continue;
    for (int64_t i = 0; i < size; ++i) {
      const double k = s.k[t * size + i], v = s.v[t * size + i];
      check("stored key", t, s.keys[s.slots[t] * size + i], k, bound * std::fabs(k));
      check("stored value", t, s.values[s.slots[t] * size + i], v, bound * std::fabs(v));
    }
  }
}

// Compares one query vector's result with attention in double precision.
void check_vector(const Step& s, int64_t row, int64_t position, int64_t vector, const float* got) {
  const int64_t head = vector % (s.heads * s.group) / s.group;
  const int64_t oldest = std::max<int64_t>(position - s.window + 1, 0);
  const float* q = s.q.data() + vector * s.size;
  std::vector<double> weights;
  double most = -INFINITY, slack = 0, total = 0;
  for (int64_t p = oldest; p <= position; ++p) {
    const float* key = s.keys.data() + s.place(row, p, head);
    double score = 0, sizes = 0;
    for (int64_t i = 0; i < s.size; ++i) {
      score += double(q[i]) * key[i], sizes += std::fabs(double(q[i]) * key[i]);
    }
    weights.push_back(score * s.scale());
    most = std::max(most, weights.back());
    slack = std::max(slack, (s.size + 4) * kUnit * sizes * s.scale());
  }
  for (double& weight : weights) total += weight = std::exp(weight - most);
  for (int64_t i = 0; i < s.size; ++i) {
    double sum = 0, sizes = 0;
    for (int64_t p = oldest; p <= position; ++p) {
      const double term = weights[p - oldest] / total * s.values[s.place(row, p, head) + i];
      sum += term, sizes += std::fabs(term);
    }
    check("attention", vector, got[i], sum,
          (2 * slack + (position - oldest + 40) * kUnit) * sizes);
  }
}

// The step of row `row` alone, from its token `skip` on, over the same pools.
Step alone(const Step& s, int64_t row, int64_t skip) {
  Step one = s;
  const int64_t first = s.starts[row] + skip, last = s.starts[row + 1];
  const int64_t of_q = s.heads * s.group * s.size, of_kv = s.heads * s.size;
  one.q = cut(s.q, first * of_q, last * of_q);
  one.k = cut(s.k, first * of_kv, last * of_kv), one.v = cut(s.v, first * of_kv, last * of_kv);
  one.slots.assign(last - first, 1 << 30);
  one.tables = cut(s.tables, row * s.width, (row + 1) * s.width);
  one.lens = {s.lens[row]}, one.starts = {0, static_cast<int32_t>(last - first)};
  return one;
}

void try_attention() {
  Step step = any_step();
  const Floats whole = attend(step, any_pool());
  check_stored(step);
  const int64_t query_heads = step.heads * step.group, of_q = query_heads * step.size;
  for (int64_t i = step.starts.back() * of_q; i < int64_t(whole.size()); ++i) {
    check("token without row", i, whole[i], 0, 0);
  }
  Step again = step;
  again.shares = !step.shares;
  ThreadPool &one = any_pool(), &two = any_pool();
  for (int64_t row = 0; row < step.num_rows(); ++row) {
    const int64_t first = step.starts[row], fed = step.starts[row + 1] - first;
    if (fed == 0) continue;
    for (int64_t n = 0; n < 3; ++n) {  // a few of many vectors
      const int64_t vector = pick(first * query_heads, (first + fed) * query_heads - 1);
      const int64_t position = step.lens[row] - fed + vector / query_heads - first;
      check_vector(step, row, position, vector, &whole[vector * step.size]);
    }
    const int64_t skip = pick(0, fed - 1);
    Step part = alone(step, row, skip);
    check_bits("attention of a row alone", attend(part, any_pool()), whole, (first + skip) * of_q);
  }
  Step third = again;
  Floats other, same;
  together([&] { other = attend(again, one); }, [&] { same = attend(third, two); });
  check_bits("attention on other threads", other, whole, 0);
  check_bits("attention at the same time", same, whole, 0);
}

void try_refusals() {
  const Buffer x = Buffer::of(Floats(6), {2, 3}), w = Buffer::of(Floats(8), {2, 4});
  const Buffer y = Buffer::of(Floats(4), {2, 2});
  if (Call().takes(x).takes(w).gives(y).run(jaxpage_matmul, any_pool()).empty()) {
    fail("matmul of other sizes", 0, 0, 1, 0);
  }
}

// Commits the fault that a sanitizer has to find, and says so if the process still runs afterwards.
int commit(const std::string& fault) {
  const int64_t rows = fault == "misaligned" ? 70 : 5, outputs = 9, size = 33;
  const Floats x = normal(rows * size), values = normal(outputs * size);
  const Buffer from = Buffer::of(x, {rows, size});
  const Buffer y = Buffer::of(Floats(rows * outputs), {rows, outputs});
  Buffer w = Buffer::of(values, {outputs, size});
  if (fault == "read") {  // the last weight is missing
    w = Buffer::of(cut(values, 0, outputs * size - 1), {outputs, size});
  } else if (fault == "misaligned") {  // rows of x begin inside a float
    Buffer shifted = Buffer::of(normal(rows * size + 1), {rows, size});
    ++shifted.at;
    run(Call().takes(shifted).takes(w).gives(y), jaxpage_matmul, *pools[0]);
  } else if (fault == "race") {  // two calls have one result
    together([&] { run(Call().takes(from).takes(w).gives(y), jaxpage_matmul, *pools[1]); },
             [&] { run(Call().takes(from).takes(w).gives(y), jaxpage_matmul, *pools[2]); });
  }
  run(Call().takes(from).takes(w).gives(y), jaxpage_matmul, *pools[0]);
  std::printf("the fault %s was not found\n", fault.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  ThreadPool none(0), one(1), two(2), five(5);
  pools[0] = &none, pools[1] = &one, pools[2] = &two, pools[3] = &five;
  const int64_t rounds = std::atoll(argv[1]), seed = argc > 2 ? std::atoll(argv[2]) : 0;
  if (rounds == 0) return commit(argv[1]);
  void (*const tries[])() = {try_matmul,   try_matmul,    try_rms_norm,  try_swiglu,
                             try_rope_qkv, try_attention, try_attention, try_argmax_logsumexp};
  std::string sets;
  for (const char* name : {"avx512", "avx2", "portable"}) {
    if (!jaxpage_choose_set(name)) continue;
    set_name = name;
    sets += std::string(" ") + name;
    try_refusals();
    for (int64_t round = 0; round < rounds; ++round) {
      random_bits.seed(seed * 1000003 + round);
      tries[round % 8]();
    }
  }
  std::printf("%lld rounds from seed %lld with each of%s: %lld numbers right\n",
              static_cast<long long>(rounds), static_cast<long long>(seed), sets.c_str(),
              static_cast<long long>(num_checks));
}
