#include "counters.h"

#include "python_frames.h"

namespace simulated {

std::recursive_mutex state_mutex;

Counters& counters() {
  static Counters* all = new Counters();
  return *all;
}

void count(const std::string& what) {
  StateLock lock(state_mutex);
  counters().other[what]++;
}

void count_host_wait(const std::string& reason) {
  std::string what = reason + " at " + where();
  StateLock lock(state_mutex);
  counters().host_waits[what]++;
}

}  // namespace simulated
