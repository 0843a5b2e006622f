// Streams: threads that run what was issued on them, in order, some time later. Events order them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "common.h"

namespace simulated {

using Work = std::function<void()>;

class Stream {
 public:
  explicit Stream(StreamId id);

  const StreamId id;
  std::string name;  // hold state_mutex
  Clock clock{};     // what is issued on the stream next is behind this; hold state_mutex

  void enqueue(Work work);
  void drain();  // the calling thread waits for all that was issued so far
  uint64_t num_issued() const { return num_issued_; }
  bool has_passed(uint64_t count) const { return num_done_ >= count; }

  // Each piece of work is held back by a time that is drawn anew.
  void set_delay(int lowest_us, int highest_us);
  void set_seed(uint32_t seed);

 private:
  void run();
  int draw_delay_us();

  std::deque<Work> queue_;
  std::mutex mutex_;
  std::condition_variable has_work_, has_done_;
  std::atomic<uint64_t> num_issued_{0}, num_done_{0};
  int lowest_us_ = 0, highest_us_ = 0;
  std::mt19937 random_;
};

Stream& stream(StreamId id);
StreamId new_stream(const std::string& name);
std::string name_of(StreamId id);
std::map<StreamId, std::string> all_streams();

// Delays of all streams, also of those that are made later.
void set_delays(int highest_us, uint32_t seed);

StreamId current_stream();
StreamId exchange_current_stream(StreamId id);

// The host's clock: all host threads count as one.
Clock& host_clock();

// An event records one moment of a stream.
class Moment {
 public:
  Clock clock{};
  void reach();
  void wait();
  bool is_reached();

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool is_reached_ = false;
};
using MomentPtr = std::shared_ptr<Moment>;

// The next work of a stream gets its number, behind all that the host knows of. Hold state_mutex.
void tick(StreamId id);

MomentPtr record_moment(StreamId id);
void stream_waits(StreamId id, const MomentPtr& moment);
void host_waits_for_stream(StreamId id, const std::string& reason);
void host_waits_for_moment(const MomentPtr& moment, const std::string& reason);
void host_waits_for_all(const std::string& reason);
bool host_asks(const MomentPtr& moment);
bool host_asks_stream(StreamId id);

// Runs everything to its end; no part of the program's order, so it is neither counted nor noted.
void drain_all();

}  // namespace simulated
