// Leaves the processor it runs on, many times; prints how often that went wrong: it stayed there,
// or may run on others than before.
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
