// Operators of the device, see operators.cpp and copies.cpp.
#pragma once

namespace simulated {

// Once all libraries are loaded.
void register_operators();

}  // namespace simulated
