// What Python sees of the device.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "counters.h"
#include "memory.h"
#include "operators.h"
#include "process_group.h"
#include "python_frames.h"
#include "races.h"
#include "streams.h"
#include "torch_device.h"

namespace py = pybind11;
using namespace simulated;

namespace {

using Size = std::array<size_t, 3>;

Size as_array(const PoolSize& size) {
  return {size.allocated, size.peak_allocated, size.reserved};
}

std::map<std::string, Size> pools() {
  std::map<std::string, Size> sizes;
  for (const auto& [id, size] : pool_sizes()) sizes[name_of(id)] = as_array(size);
  return sizes;
}

void clear_counts() {
  StateLock lock(state_mutex);
  counters() = Counters();
  reset_peaks();
}

template <class T>
auto counted(T Counters::*member) {
  return [member] {
    StateLock lock(state_mutex);
    return counters().*member;
  };
}

void set_name(StreamId id, const std::string& name) {
  StateLock lock(state_mutex);
  stream(id).name = name;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_device();
  register_operators();
  stream(kCompute);
  module.def("make_process_group", make_process_group);

  module.def("races", races);
  module.def("clear_races", clear_races);
  module.def("set_detection", [](bool is_on) {
    set_detection(is_on);
    set_frames(is_on);
  });

  module.def("launches", counted(&Counters::launches));
  module.def("host_waits", counted(&Counters::host_waits));
  module.def("other_counts", counted(&Counters::other));
  module.def("collectives", counted(&Counters::collectives));
  module.def("clear_counts", clear_counts);
  module.def("pools", pools);
  module.def("all_pools", [] { return as_array(all_pools()); });

  module.def("streams", all_streams);
  module.def("set_name", set_name);
  module.def("set_delay", [](StreamId id, int lowest_us, int highest_us) {
    stream(id).set_delay(lowest_us, highest_us);
  });
  module.def("set_delays", set_delays);
  module.def("current_stream", current_stream);
  module.def("exchange_current_stream", exchange_current_stream);
  module.def("drain_all", drain_all);
  module.def("default_generator", device_generator);
}
