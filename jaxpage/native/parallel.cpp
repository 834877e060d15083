// The places of all helpers. Not in the header: what is static in an inline function is one for all
// builds of the library that a process has loaded, and they may differ.
#include "parallel.h"

jaxpage::HelperPlace& jaxpage::helper_place(int64_t worker) {
  static auto* const places = new HelperPlace[kMostWorkers];  // a helper may outlive static objects
  return places[worker];
}
