// Leaves the processor that it runs on, 100 times, and prints two counts: how often it stayed, and
// how often it may run on other processors than before.
#include <cstdio>
#include <cstring>

#include "parallel.h"

int main() {
  int stayed = 0, bound = 0;
  for (int turn = 0; turn < 100; ++turn) {
    cpu_set_t before, after;
    sched_getaffinity(0, sizeof before, &before);
    const int processor = jaxpage::this_processor();
    jaxpage::leave_processor(processor);
    stayed += jaxpage::this_processor() == processor;
    sched_getaffinity(0, sizeof after, &after);
    bound += std::memcmp(&before, &after, sizeof before) != 0;
  }
  std::printf("%d %d\n", stayed, bound);
}
