// Prints what find_prefixes finds in tables of blocks of 16 tokens: a line for each prefix, its
// number of chunks and then its rows. Arguments: the tables' width, then of each row its number of
// tokens and its table.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "prefixes.h"

int main(int argc, char** argv) {
  jaxpage::Attention a{};
  a.block_size = 16, a.num_kv_heads = 2, a.num_blocks = 1000, a.window = 1 << 30;
  a.table_width = std::atoi(argv[1]);
  std::vector<int32_t> tables;
  std::vector<jaxpage::AttentionJob> jobs;
  for (int at = 2; at < argc; at += 1 + a.table_width) {
    const int64_t row = (at - 2) / (1 + a.table_width);
    for (int i = 0; i < a.table_width; ++i) tables.push_back(std::atoi(argv[at + 1 + i]));
    const int64_t position = std::atoi(argv[at]) - 1;
    jobs.push_back({row, 0, 2, nullptr, position, 1, 0, 0, nullptr, nullptr, false});
  }
  a.block_tables = tables.data();
  for (const auto& prefix : jaxpage::find_prefixes(a, jobs)) {
    std::printf("%d", static_cast<int>(prefix.num_chunks));
    for (const int64_t job : prefix.jobs) std::printf(" %d", static_cast<int>(jobs[job].row));
    std::printf("\n");
  }
}
