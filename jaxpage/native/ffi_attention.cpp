// The custom call of attention: stores a step's keys and values in the pools, then cuts the step's
// queries into jobs of attention.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "prefixes.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using namespace jaxpage;

namespace {

using Shape = ffi::Span<const int64_t>;
using Numbers = std::unique_ptr<float[]>;  // not initialised

bool same(Shape a, Shape b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

// The bits of a bfloat16: the upper half of the float, rounded to nearest, ties to even; NaN stays
// NaN.
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// A step's keys, or its values, and where each token's are stored.
struct Store {
  const float* from;        // [T, size]
  void* pool;               // [num_slots, size], float or bfloat16
  const int32_t* slots;     // [T]; tokens with slots outside of the pool are not stored
  int64_t num_slots, size;  // size: K * H numbers a token
};

// Stores tokens first .. last - 1.
void store(const Store& s, bool is_bfloat16, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    if (s.slots[t] < 0 || s.slots[t] >= s.num_slots) continue;
    const float* from = s.from + t * s.size;
    if (is_bfloat16) {
      uint16_t* to = static_cast<uint16_t*>(s.pool) + s.slots[t] * s.size;
      std::transform(from, from + s.size, to, to_bfloat16);
    } else {
      std::memcpy(static_cast<float*>(s.pool) + s.slots[t] * s.size, from, s.size * sizeof(float));
    }
  }
}

// The rows of a step: row b has tokens starts[b] .. starts[b + 1] - 1, which are the last of its
// context_lens[b].
struct Rows {
  const int32_t* context_lens;  // [B]
  const int32_t* starts;        // [B + 1]
  int64_t count, num_tokens;    // B, T
};

// Cuts each row's tokens into jobs of up to kMostVectors query vectors a KV head, of all heads. The
// last tokens of a prompt see the most keys, so their jobs come first. tokens [T]: 0, 1, 2, ...
std::vector<AttentionJob> cut_rows(const Attention& a, const Rows& rows, const int32_t* tokens) {
  std::vector<AttentionJob> jobs;
  const int64_t tile = a.group < kMostVectors ? kMostVectors / a.group : 1;
  const int64_t most = a.table_width * a.block_size;
  jobs.reserve(rows.count + rows.num_tokens / tile);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t context = std::min<int64_t>(rows.context_lens[row], most);
    const int64_t begin = std::max<int64_t>(rows.starts[row], 0);
    const int64_t count = std::min<int64_t>(rows.starts[row + 1], rows.num_tokens) - begin;
    if (context <= 0 || count <= 0 || count > context) continue;
    for (int64_t skip = (count - 1) / tile * tile; skip >= 0; skip -= tile) {
      const int64_t here = std::min(count - skip, tile), position = context - count + skip;
      const int64_t oldest = std::max<int64_t>(position - a.window + 1, 0);
      const int64_t first = oldest / kPartition * (kPartition / kChunk);
      const int64_t last = (position + here + kChunk - 1) / kChunk;
      jobs.push_back({row, 0, a.num_kv_heads, tokens + begin + skip, position, here, first, last,
                      nullptr, nullptr, false});
    }
  }
  return jobs;
}

// Into how many jobs a tile, which is a job of all heads, is cut. Each has as many heads as
// kMostVectors query vectors allow, at most `most` and at least one.
int64_t num_cuts(const Attention& a, const AttentionJob& tile, int64_t most) {
  const int64_t fit = std::min(most, kMostVectors / vectors_of_head(a, tile));
  return fit > 1 ? (tile.num_heads + fit - 1) / fit : tile.num_heads;
}

// Cuts tiles into jobs of several heads each: heads lie side by side in the pool and are read
// together. count: how many pieces, tiles or their partitions, there are for the threads; where
// they would make fewer than `enough` jobs, each has fewer heads.
std::vector<AttentionJob> cut_heads(const Attention& a, const std::vector<AttentionJob>& tiles,
                                    int64_t count, int64_t enough) {
  const int64_t most = a.num_kv_heads * count / enough;
  std::vector<AttentionJob> jobs;
  int64_t needed = 0;
  for (const auto& tile : tiles) needed += num_cuts(a, tile, most);
  jobs.reserve(needed);
  for (const auto& tile : tiles) {
    const int64_t cuts = num_cuts(a, tile, most);
    for (int64_t i = 0; i < cuts; ++i) {
      jobs.push_back(tile);
      jobs.back().kv_head = tile.num_heads * i / cuts;
      jobs.back().num_heads = tile.num_heads * (i + 1) / cuts - jobs.back().kv_head;
    }
  }
  return jobs;
}

// Query vectors of the largest job; 1 for no jobs.
int64_t most_vectors(const Attention& a, const std::vector<AttentionJob>& jobs) {
  int64_t vectors = 1;
  for (const auto& job : jobs) vectors = std::max(vectors, num_vectors(a, job));
  return vectors;
}

// Runs jobs on all threads, each thread in scratch memory of its own.
void run_jobs(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16,
              const std::vector<AttentionJob>& jobs) {
  const int64_t floats = scratch_floats(most_vectors(a, jobs), a.head_dim);
  const Numbers scratch(new float[num_workers(pool) * floats]);
  parallel_for(pool, jobs.size(), [&](int64_t job, int64_t worker, bool is_next_mine) {
    const AttentionJob* next = is_next_mine ? &jobs[job + 1] : nullptr;
    kernels().attend(a, is_bfloat16, jobs[job], next, scratch.get() + worker * floats);
  });
}

// How many jobs keep all threads busy until the last one ends.
int64_t num_enough(const ffi::ThreadPool& pool) { return 8 * num_workers(pool); }

// How many partitions of keys a job reads.
int64_t num_partitions(const AttentionJob& job) {
  constexpr int64_t kChunks = kPartition / kChunk;
  return (job.last_chunk + kChunks - 1) / kChunks - job.first_chunk / kChunks;
}

// Runs few jobs over many keys: each partition becomes a job that leaves its state, and the states
// are merged at the end.
void run_split(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16,
               const std::vector<AttentionJob>& jobs) {
  std::vector<int64_t> starts;
  int64_t needed = 0;
  starts.reserve(jobs.size());
  for (const auto& job : jobs) {
    starts.push_back(needed);
    needed += num_partitions(job) * state_floats(num_vectors(a, job), a.head_dim);
  }
  const Numbers partials(new float[needed]);
  std::vector<AttentionJob> parts;
  for (size_t i = 0; i < jobs.size(); ++i) {
    AttentionJob part = jobs[i];
    part.partial = partials.get() + starts[i];
    for (int64_t chunk = jobs[i].first_chunk; chunk < jobs[i].last_chunk;) {
      part.first_chunk = chunk;
      chunk = part.last_chunk = std::min(chunk + kPartition / kChunk, jobs[i].last_chunk);
      parts.push_back(part);
      part.partial += state_floats(num_vectors(a, part), a.head_dim);
    }
  }
  run_jobs(pool, a, is_bfloat16, parts);
  const Numbers scratch(new float[scratch_floats(most_vectors(a, jobs), a.head_dim)]);
  for (size_t i = 0; i < jobs.size(); ++i) {
    kernels().merge(a, jobs[i], partials.get() + starts[i], scratch.get());
  }
}

// How many of the `count` rows that share a prefix one job takes: as many as kMostVectors allow, or
// fewer where more jobs are needed to give all threads as much to do.
int64_t tile_tokens(const Attention& a, int64_t count, int64_t workers) {
  const int64_t most = a.group < kMostVectors ? kMostVectors / a.group : 1;
  int64_t tiles = (count + most - 1) / most;
  while (a.num_kv_heads * tiles % workers && a.num_kv_heads * tiles < 4 * workers) ++tiles;
  return (count + tiles - 1) / tiles;
}

// Runs a step whose rows share leading blocks: first jobs that read each shared prefix once for all
// of its rows, then the jobs of the rows, which resume from there.
void run_shared(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16,
                std::vector<AttentionJob>& jobs, const std::vector<SharedPrefix>& prefixes) {
  const int64_t num_heads = a.num_kv_heads;
  std::vector<int32_t> tokens;
  for (const auto& prefix : prefixes) {
    for (const int64_t index : prefix.jobs) tokens.push_back(jobs[index].tokens[0]);
  }
  const auto last = *std::max_element(tokens.begin(), tokens.end());
  const Numbers carry(new float[(last + 1) * num_heads * 2 * state_floats(a.group, a.head_dim)]);
  std::vector<AttentionJob> shared;
  const int32_t* own = tokens.data();
  for (const auto& prefix : prefixes) {
    const int64_t count = prefix.jobs.size(), row = jobs[prefix.jobs[0]].row;
    const int64_t tile = tile_tokens(a, count, num_workers(pool));
    for (int64_t first = 0; first < count; first += tile) {
      for (int64_t head = 0; head < num_heads; ++head) {
        shared.push_back({row, head, 1, own + first, prefix.num_chunks * kChunk,
                          std::min(tile, count - first), 0, prefix.num_chunks, nullptr,
                          carry.get(), true});
      }
    }
    for (const int64_t index : prefix.jobs) {
      jobs[index].first_chunk = prefix.num_chunks;
      jobs[index].carry = carry.get();
    }
    own += count;
  }
  run_jobs(pool, a, is_bfloat16, shared);
  run_jobs(pool, a, is_bfloat16, cut_heads(a, jobs, jobs.size(), num_enough(pool)));
}

// Chooses how to run a step: shared prefixes once, split over partitions, or a job for each tile.
void attend(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16, const Rows& rows,
            bool shares_prefixes) {
  std::vector<int32_t> tokens(rows.num_tokens);
  for (int64_t t = 0; t < rows.num_tokens; ++t) tokens[t] = static_cast<int32_t>(t);
  auto tiles = cut_rows(a, rows, tokens.data());
  const int64_t num_tiles = tiles.size(), enough = num_enough(pool);
  int64_t longest = 0, num_jobs = 0, num_parts = 0;
  for (const auto& tile : tiles) {
    longest = std::max(longest, num_partitions(tile));
    num_jobs += num_cuts(a, tile, a.num_kv_heads);
    num_parts += num_partitions(tile);
  }
  if (shares_prefixes && (longest < 2 || num_tiles * a.num_kv_heads >= enough)) {
    const auto prefixes = find_prefixes(a, tiles);
    if (!prefixes.empty()) return run_shared(pool, a, is_bfloat16, tiles, prefixes);
  }
  if (longest > 1 && num_jobs < enough) {
    return run_split(pool, a, is_bfloat16, cut_heads(a, tiles, num_parts, enough));
  }
  run_jobs(pool, a, is_bfloat16, cut_heads(a, tiles, num_tiles, enough));
}

// Stores the tokens' keys and values, and sets out to 0, as it stays for padding tokens and empty
// rows.
void store_and_clear(ffi::ThreadPool& pool, const Attention& a, bool is_bfloat16, const Store& keys,
                     const Store& values, int64_t num_tokens) {
  constexpr int64_t kPiece = 16;  // tokens; other threads save no time on fewer than three pieces
  const int64_t size = a.num_kv_heads * a.group * a.head_dim;
  const int64_t pieces = num_tokens < 3 * kPiece ? 1 : num_tokens / kPiece;
  parallel_for(pool, pieces, [&](int64_t piece, int64_t, bool) {
    const int64_t first = num_tokens * piece / pieces, last = num_tokens * (piece + 1) / pieces;
    store(keys, is_bfloat16, first, last);
    store(values, is_bfloat16, first, last);
    if (size > 0) std::memset(a.out + first * size, 0, (last - first) * size * sizeof(float));
  });
}

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k,
                     ffi::Buffer<ffi::F32> v, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                     ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> block_tables,
                     ffi::Buffer<ffi::S32> context_lens, ffi::Buffer<ffi::S32> query_starts,
                     ffi::ResultBuffer<ffi::F32> out, ffi::Result<ffi::AnyBuffer> new_k,
                     ffi::Result<ffi::AnyBuffer> new_v, float scale, int64_t window,
                     bool shares_prefixes) {
  const auto qs = q.dimensions(), ks = k.dimensions(), ps = k_pool.dimensions();
  const auto bs = block_tables.dimensions();
  const auto type = k_pool.element_type();
  const auto tokens = static_cast<int64_t>(slots.element_count());
  if (qs.size() != 3 || ks.size() != 3 || ps.size() != 4 || bs.size() != 2 || qs[0] != tokens ||
      ks[0] != tokens || ks[1] != ps[2] || ks[2] != ps[3] || qs[2] != ps[3] || ps[2] == 0 ||
      qs[1] % ps[2] != 0 || ps[0] == 0 || ps[1] == 0 || !same(v.dimensions(), ks) ||
      !same(out->dimensions(), qs) || !same(v_pool.dimensions(), ps) ||
      v_pool.element_type() != type || (type != ffi::F32 && type != ffi::BF16) ||
      static_cast<int64_t>(context_lens.element_count()) != bs[0] ||
      static_cast<int64_t>(query_starts.element_count()) != bs[0] + 1) {
    return ffi::Error::InvalidArgument(
        "wanted q [T, N, H], k and v [T, K, H], pools [P, S, K, H] in float32 or bfloat16, N a "
        "multiple of K, slots [T], block_tables [B, M], context_lens [B], query_starts [B + 1]");
  }
  if (new_k->untyped_data() != k_pool.untyped_data() ||
      new_v->untyped_data() != v_pool.untyped_data()) {
    return ffi::Error::Internal("the pools of a native attention call are not updated in place");
  }
  const Attention a{q.typed_data(), new_k->untyped_data(), new_v->untyped_data(),
                    block_tables.typed_data(), out->typed_data(), ps[0], ps[1], ps[2],
                    qs[1] / ps[2], qs[2], bs[1], window, scale};
  if (tokens == 0 || qs[2] == 0) return ffi::Error::Success();  // nothing to store or to attend to
  const bool is_bfloat16 = type == ffi::BF16;
  const int64_t size = ps[2] * ps[3], num_slots = ps[0] * ps[1];
  store_and_clear(
      pool, a, is_bfloat16,
      {k.typed_data(), new_k->untyped_data(), slots.typed_data(), num_slots, size},
      {v.typed_data(), new_v->untyped_data(), slots.typed_data(), num_slots, size}, tokens);
  if (qs[1] == 0) return ffi::Error::Success();  // no query heads
  attend(pool, a, is_bfloat16,
         {context_lens.typed_data(), query_starts.typed_data(), bs[0], tokens}, shares_prefixes);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<bool>("shares_prefixes"));
