// Operators that are the device's own: memory, views, copies to and from the host.
//
// A copy between host and device holds up the host unless it is non-blocking and the host's memory
// is pinned, as on CUDA; from pageable memory, a non-blocking copy takes what is there at the call.
// What a non-blocking copy will write on the host is filled with NaN until it runs, so that a
// program that reads too early computes with NaN.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

#include "counters.h"
#include "memory.h"
#include "torch_device.h"

namespace simulated {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::get_default_dtype_as_scalartype());
}

// -- memory --------------------------------------------------------------------------------------
void check_index(std::optional<at::Device> device) {
  TORCH_CHECK(!device || device->index() <= 0, "a process has one simulated device, index 0");
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  check_index(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  check_index(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           or_default(dtype));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous,
              "resize_ on the simulated device is for contiguous tensors");
  IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t numel = c10::multiply_integers(sizes);
  size_t needed_bytes = (numel + tensor.storage_offset()) * tensor.itemsize();
  if (numel && tensor.storage().nbytes() < needed_bytes)
    resize_storage(tensor.storage(), needed_bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_strided(Tensor& tensor, at::Storage storage, c10::SymInt offset, SymIntArrayRef size,
                    SymIntArrayRef stride) {
  IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> steps(strides.begin(), strides.end());
  if (steps.empty()) {
    steps.resize(sizes.size());
    int64_t step = 1;
    for (size_t dim = sizes.size(); dim-- > 0; step *= std::max<int64_t>(sizes[dim], 1))
      steps[dim] = step;
  }
  impl->set_sizes_and_strides(sizes, steps, offset.guard_int(__FILE__, __LINE__));
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  int64_t numel = storage.nbytes() / tensor.itemsize();
  return set_strided(tensor, std::move(storage), 0, {c10::SymInt(numel)}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_strided(tensor, other.storage(), other.storage_offset(), other.sym_sizes(),
                     other.sym_strides());
}

Tensor& set_nothing(Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0),
                       device_allocator(), true);
  return set_strided(tensor, storage, 0, {c10::SymInt(0)}, {});
}

bool is_set_to(const Tensor& a, const Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

void record_stream(Tensor& tensor, c10::Stream s) {
  if (tensor.storage().data() != nullptr)
    mark_used_by(tensor.storage().data(), static_cast<StreamId>(s.id()));
}

// -- views ---------------------------------------------------------------------------------------
Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

// -- copies --------------------------------------------------------------------------------------
void copy_here(const Tensor& from, const Tensor& to) {
  Tensor source = for_kernels(from), target = for_kernels(to);
  const char* name = from.dtype() == to.dtype() ? "copy_" : "copy_ (cast)";
  Work copy = [=] { target.copy_(source); };
  launch(current_stream(), copy, {span_of(from)}, {span_of(to)}, name);
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool pinned = is_pinned(from.const_data_ptr());
  Tensor source = pinned ? from : from.clone(), target = for_kernels(to);
  std::vector<Span> reads;
  if (pinned) reads.push_back(span_of(from));
  Work copy = [=] { target.copy_(source); };
  launch(current_stream(), copy, reads, {span_of(to)},
         pinned ? "copy from pinned memory" : "copy from pageable memory");
  if (!non_blocking) host_waits_for_stream(current_stream(), "blocking copy to the device");
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool pinned = is_pinned(to.const_data_ptr());
  Tensor source = for_kernels(from);
  std::vector<Span> writes;
  if (pinned) writes.push_back(span_of(to));
  if (pinned && non_blocking && to.is_contiguous()) memset(to.data_ptr(), 0xFF, to.nbytes());
  Work copy = [=] { to.copy_(source); };
  launch(current_stream(), copy, {span_of(from)}, writes,
         pinned ? "copy to pinned memory" : "copy to pageable memory");
  if (!(non_blocking && pinned))
    host_waits_for_stream(current_stream(), non_blocking ? "copy to pageable memory"
                                                         : "blocking copy to the host");
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!to.numel()) return to;
  Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (is_ours(source) && is_ours(to)) {
    copy_here(source, to);
  } else if (is_ours(to)) {
    copy_to_device(source, to, non_blocking);
  } else {
    copy_to_host(source, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// One kernel where all is on the device; between host and device each tensor is a copy.
void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  std::vector<Tensor> sources, targets;
  std::vector<Span> reads, writes;
  for (size_t i = 0; i < to.size(); i++) {
    if (!is_ours(to[i]) || !is_ours(from[i])) {
      to[i].copy_(from[i], non_blocking);
    } else if (to[i].numel()) {
      Tensor source = from[i].sizes() == to[i].sizes() ? from[i] : from[i].expand(to[i].sizes());
      sources.push_back(for_kernels(source));
      targets.push_back(for_kernels(to[i]));
      reads.push_back(span_of(source));
      writes.push_back(span_of(to[i]));
    }
  }
  if (targets.empty()) return;
  Work copy = [=] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i]);
  };
  launch(current_stream(), copy, reads, writes, "_foreach_copy_");
}

at::Scalar local_scalar(const Tensor& tensor) {
  Tensor on_host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  Tensor source = for_kernels(tensor);
  Work copy = [=] { on_host.copy_(source); };
  launch(current_stream(), copy, {span_of(tensor)}, {}, "item");
  host_waits_for_stream(current_stream(), "item");
  return on_host.item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_strided);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("is_set_to", is_set_to);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_foreach_copy_", foreach_copy_);
  library.impl("_local_scalar_dense", local_scalar);
}

}  // namespace
}  // namespace simulated
