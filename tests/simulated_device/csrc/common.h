// What all parts of the simulated device share: names for streams, vector clocks, one lock.
//
// A clock has one entry for each stream and one for the host. An entry counts what its owner has
// issued; `clock[s] >= t` says that whoever holds the clock is ordered behind the work with number
// t of stream s. Clocks are moved when work is issued, not when it runs, so what they say depends
// on the program alone and never on how fast the threads are.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <string>

namespace simulated {

using StreamId = int;
constexpr StreamId kCompute = 0;      // the default stream
constexpr int kMaxStreams = 128;
constexpr StreamId kHost = kMaxStreams;

using Clock = std::array<uint64_t, kMaxStreams + 1>;

inline void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

// Half-open range of addresses.
struct Span {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool is_empty() const { return begin == end; }
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
  bool holds(const Span& other) const { return begin <= other.begin && other.end <= end; }
};

// Guards clocks, memory, histories and counters. Streams' queues have locks of their own. Nobody
// asks for Python's global lock while holding it.
extern std::recursive_mutex state_mutex;
using StateLock = std::lock_guard<std::recursive_mutex>;

}  // namespace simulated
