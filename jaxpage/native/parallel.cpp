// The places of all helpers. Not in the header: a static of an inline function is shared by all
// builds of this library that a process has loaded, and those may differ.
#include "parallel.h"

jaxpage::HelperPlace& jaxpage::helper_place(int64_t worker) {
  static auto* const places = new HelperPlace[kMostWorkers];  // a helper may outlive static objects
  return places[worker];
}
