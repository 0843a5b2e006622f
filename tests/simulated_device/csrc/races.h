// Finds what streams leave unordered, from vector clocks over byte ranges.
//
//   an access and an earlier one of another stream overlap, one of them writes, and the later one
//   is not ordered behind the earlier one                                            -> a race
//   a stream allocates while a free block of its pool holds an access that the stream is not
//   ordered behind (it may be handed that block, by chance)                          -> a race
//
// A strided view counts as all bytes from its first to its last.
#pragma once

#include <string>
#include <vector>

#include "common.h"
#include "streams.h"

namespace simulated {

struct Access {
  Span span;
  StreamId stream;
  uint64_t time;
  bool is_write;
  std::string what;
};

// What a block of memory has seen, as far as it may still matter.
class History {
 public:
  void add(const Access& access);
  void clear() { accesses_.clear(); }

  // Forgets what `clock` is ordered behind.
  void forget(const Clock& clock);
  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  std::vector<Access> accesses_;
};

// Work of a stream: its clock ticks, its accesses are noted, and it is queued. `make_work` is called
// at the moment when the place in the queue is certain.
void launch_made(StreamId id, const std::function<Work()>& make_work,
                 const std::vector<Span>& reads, const std::vector<Span>& writes,
                 const std::string& name);
void launch(StreamId id, Work work, const std::vector<Span>& reads,
            const std::vector<Span>& writes, const std::string& name);

// The same without counting it as a launch: memory that an allocation fills.
void note_allocation(StreamId id, Span span, const std::string& what);
void note_reuse(StreamId id, const Access& left, const std::string& freed_at,
                const std::string& what);

// The host runs a kernel by itself, all streams that matter being drained.
void note_on_host(StreamId id, const std::vector<Span>& reads, const std::vector<Span>& writes,
                  const std::string& name);

std::vector<std::string> races();
void clear_races();
void set_detection(bool is_on);
bool is_detecting();

}  // namespace simulated
