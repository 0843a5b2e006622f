// The device as torch sees it: allocators, current device and stream, events, random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <functional>

#include "streams.h"

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline c10::Device the_device() { return c10::Device(kDevice, 0); }
inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

c10::Allocator* device_allocator();
void resize_storage(const c10::Storage& storage, size_t size_bytes);

// The bytes of a tensor, from its first to its last.
Span span_of(const at::Tensor& tensor);
std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors);

// A CPU tensor over the same bytes, for kernels on streams.
at::Tensor for_kernels(const at::Tensor& tensor);

// Random kernels draw from a CPU generator behind the device's, in the order in which they were
// issued, whatever their streams. Host threads that ask the generator wait until they have.
// Hold state_mutex from here until the work is queued, as `launch` does.
at::Generator device_generator();
Work in_random_order(const at::Generator& generator, std::function<void(at::Generator&)> kernel);

// Makes torch know the device.
void register_device();

}  // namespace simulated
