#include "streams.h"

#include <c10/core/InferenceMode.h>

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <thread>

#include "counters.h"
#include "python_frames.h"

namespace simulated {
namespace {

constexpr int kKernelFailed = 77;  // exit code of the process

// Streams live as long as the process: their threads may still wait when it ends.
std::array<Stream*, kMaxStreams> streams{};
int num_streams = 1;
int default_delay_us = 0;
uint32_t default_seed = 0;

thread_local StreamId current = kCompute;

}  // namespace

Stream::Stream(StreamId id) : id(id) {
  set_seed(default_seed);
  highest_us_ = default_delay_us;
  std::thread([this] { run(); }).detach();
}

void Stream::run() {
  // Kernels write to the host's inference tensors too; what autograd is to know it has seen there.
  c10::InferenceMode below_autograd;
  for (;;) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_work_.wait(lock, [&] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    if (int delay_us = draw_delay_us())
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    try {
      work();
    } catch (const std::exception& error) {
      // The host has gone on long since: as on a real device, the process cannot be saved.
      fprintf(stderr, "simulated device: a kernel on stream %d failed: %s\n", id, error.what());
      fflush(stderr);
      _exit(kKernelFailed);
    }
    work = nullptr;  // drops its tensors before others see it done
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_done_++;
    }
    has_done_.notify_all();
  }
}

int Stream::draw_delay_us() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (highest_us_ <= 0) return 0;
  return lowest_us_ + static_cast<int>(random_() % (highest_us_ - lowest_us_ + 1));
}

void Stream::enqueue(Work work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    num_issued_++;
  }
  has_work_.notify_one();
}

void Stream::drain() {
  uint64_t target = num_issued_;
  std::unique_lock<std::mutex> lock(mutex_);
  has_done_.wait(lock, [&] { return num_done_ >= target; });
}

void Stream::set_delay(int lowest_us, int highest_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  lowest_us_ = lowest_us;
  highest_us_ = std::max(lowest_us, highest_us);
}

void Stream::set_seed(uint32_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed * 7919u + static_cast<uint32_t>(id));
}

Stream& stream(StreamId id) {
  StateLock lock(state_mutex);
  if (id < 0 || id >= num_streams) throw std::out_of_range("no such stream on the device");
  if (streams[id] == nullptr) streams[id] = new Stream(id);
  return *streams[id];
}

StreamId new_stream(const std::string& name) {
  StateLock lock(state_mutex);
  if (num_streams == kMaxStreams)
    throw std::runtime_error(
        "the simulated device has 128 streams, which are never given back; make fewer");
  StreamId id = num_streams++;
  stream(id).name = name;
  return id;
}

std::string name_of(StreamId id) {
  if (id == kHost) return "host";
  StateLock lock(state_mutex);
  const std::string& name = stream(id).name;
  if (!name.empty()) return name;
  return id == kCompute ? "compute" : "stream" + std::to_string(id);
}

std::map<StreamId, std::string> all_streams() {
  StateLock lock(state_mutex);
  std::map<StreamId, std::string> names;
  for (StreamId id = 0; id < num_streams; id++) names[id] = name_of(id);
  return names;
}

void set_delays(int highest_us, uint32_t seed) {
  StateLock lock(state_mutex);
  default_delay_us = highest_us;
  default_seed = seed;
  for (StreamId id = 0; id < num_streams; id++) {
    stream(id).set_seed(seed);
    stream(id).set_delay(0, highest_us);
  }
}

StreamId current_stream() { return current; }

StreamId exchange_current_stream(StreamId id) {
  StreamId before = current;
  current = id;
  return before;
}

Clock& host_clock() {
  static Clock* clock = new Clock{};
  return *clock;
}

void Moment::reach() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_reached_ = true;
  }
  condition_.notify_all();
}

void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  condition_.wait(lock, [&] { return is_reached_; });
}

bool Moment::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

void tick(StreamId id) {
  Clock& clock = stream(id).clock;
  join(clock, host_clock());
  clock[id]++;
}

MomentPtr record_moment(StreamId id) {
  StateLock lock(state_mutex);
  auto moment = std::make_shared<Moment>();
  tick(id);
  moment->clock = stream(id).clock;
  stream(id).enqueue([moment] { moment->reach(); });
  count("events recorded");
  return moment;
}

void stream_waits(StreamId id, const MomentPtr& moment) {
  StateLock lock(state_mutex);
  join(stream(id).clock, moment->clock);
  stream(id).enqueue([moment] { moment->wait(); });
  count("events waited for");
}

void host_waits_for_stream(StreamId id, const std::string& reason) {
  count_host_wait(reason);
  Clock reached;
  {
    StateLock lock(state_mutex);
    reached = stream(id).clock;
  }
  {
    WithoutPythonLock released;
    stream(id).drain();
  }
  StateLock lock(state_mutex);
  join(host_clock(), reached);
}

void host_waits_for_moment(const MomentPtr& moment, const std::string& reason) {
  count_host_wait(reason);
  {
    WithoutPythonLock released;
    moment->wait();
  }
  StateLock lock(state_mutex);
  join(host_clock(), moment->clock);
}

void host_waits_for_all(const std::string& reason) {
  count_host_wait(reason);
  for (const auto& [id, name] : all_streams()) {
    Clock reached;
    {
      StateLock lock(state_mutex);
      reached = stream(id).clock;
    }
    {
      WithoutPythonLock released;
      stream(id).drain();
    }
    StateLock lock(state_mutex);
    join(host_clock(), reached);
  }
}

bool host_asks(const MomentPtr& moment) {
  if (!moment->is_reached()) return false;
  StateLock lock(state_mutex);
  join(host_clock(), moment->clock);
  return true;
}

bool host_asks_stream(StreamId id) {
  StateLock lock(state_mutex);
  Stream& asked = stream(id);
  if (!asked.has_passed(asked.num_issued())) return false;
  join(host_clock(), asked.clock);
  return true;
}

void drain_all() {
  WithoutPythonLock released;
  for (const auto& [id, name] : all_streams()) stream(id).drain();
}

}  // namespace simulated
