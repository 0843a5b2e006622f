// What a program made the device do, counted.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "common.h"

namespace simulated {

using Counts = std::map<std::string, int64_t>;

struct Counters {
  Counts launches;    // "stream operator": kernels, copies and collectives
  Counts host_waits;  // "reason at place": each time the host had to wait for the device
  Counts other;       // record_stream, events, allocations, deferred frees
  std::vector<std::string> collectives;  // in the order of issue, with sizes and alignment
};

// Hold state_mutex.
Counters& counters();

void count(const std::string& what);
void count_host_wait(const std::string& reason);

}  // namespace simulated
