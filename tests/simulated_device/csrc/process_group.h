// The backend "simccl": collectives on a stream of the process group, as NCCL has them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

// Collectives of the device, moved by a Gloo backend of the same ranks.
c10::intrusive_ptr<c10d::Backend> make_process_group(c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace simulated
