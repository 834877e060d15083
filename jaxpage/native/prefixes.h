// Finds the decoding rows that begin with the same blocks, by their block tables alone.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "kernels.h"

namespace jaxpage {

struct SharedPrefix {
  std::vector<int64_t> jobs;  // indices of the rows' jobs, one a row
  int64_t num_chunks;         // leading chunks of keys that the rows share
};

// Sorts the jobs of one token by their block tables, so that rows that share blocks are neighbours.
// Jobs with less than a chunk of keys before their token are left out.
class PrefixFinder {
 public:
  PrefixFinder(const Attention& a, const std::vector<AttentionJob>& jobs) : a_(a), jobs_(jobs) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (jobs[i].num_tokens == 1 && jobs[i].first_position >= kChunk) order_.push_back(i);
    }
    std::sort(order_.begin(), order_.end(), [&](int64_t x, int64_t y) {
      return std::lexicographical_compare(table(x), table(x) + num_blocks(x), table(y),
                                          table(y) + num_blocks(y));
    });
  }

  // Of neighbours first .. last - 1, adds to `found` what saves most: one prefix of them all, or
  // longer prefixes of some of them. Returns how many chunks need not be read again.
  int64_t search(int64_t first, int64_t last, std::vector<SharedPrefix>& found) const {
    if (last - first < 2) return 0;
    const int64_t depth = num_same(order_[first], order_[last - 1]);
    const int64_t chunks = depth * a_.block_size / kChunk;
    const int64_t saved = (last - first - 1) * chunks;
    std::vector<SharedPrefix> parts;
    int64_t saved_apart = 0;
    for (int64_t from = first; from < last;) {
      int64_t to = from + 1;
      while (to < last && num_same(order_[from], order_[to]) > depth) ++to;
      if (to - from < last - first) saved_apart += search(from, to, parts);
      from = to;
    }
    if (saved_apart > saved) {
      std::move(parts.begin(), parts.end(), std::back_inserter(found));
    } else if (saved > 0) {
      found.push_back({{order_.begin() + first, order_.begin() + last}, chunks});
    }
    return std::max(saved, saved_apart);
  }

  int64_t size() const { return order_.size(); }

 private:
  const int32_t* table(int64_t job) const {
    return a_.block_tables + jobs_[job].row * a_.table_width;
  }
  // Full blocks before the row's own token.
  int64_t num_blocks(int64_t job) const { return jobs_[job].first_position / a_.block_size; }

  int64_t num_same(int64_t x, int64_t y) const {
    const int64_t most = std::min(num_blocks(x), num_blocks(y));
    return std::mismatch(table(x), table(x) + most, table(y)).first - table(x);
  }

  const Attention& a_;
  const std::vector<AttentionJob>& jobs_;
  std::vector<int64_t> order_;
};

// The prefixes worth reading once. None where a sliding window hides keys: each row then sees other
// keys of what it shares.
inline std::vector<SharedPrefix> find_prefixes(const Attention& a,
                                               const std::vector<AttentionJob>& jobs) {
  std::vector<SharedPrefix> found;
  if (a.window < a.table_width * a.block_size) return found;
  const PrefixFinder finder(a, jobs);
  finder.search(0, finder.size(), found);
  return found;
}

}  // namespace jaxpage
