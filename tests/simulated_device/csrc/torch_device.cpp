#include "torch_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "counters.h"
#include "memory.h"
#include "python_frames.h"

namespace simulated {
namespace {

// -- allocators ----------------------------------------------------------------------------------
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return {nullptr, nullptr, [](void*) {}, the_device()};
    try {
      Block* block = simulated::allocate(size_bytes);
      auto give_back = [](void* given) { free_block(static_cast<Block*>(given)); };
      return {reinterpret_cast<void*>(block->span.begin), block, give_back, the_device()};
    } catch (const std::bad_alloc&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the simulated device has no ", size_bytes,
                       " bytes left: its pools hold ", all_pools().reserved,
                       ". Train a smaller model on it");
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size_bytes) const override {
    auto read = reinterpret_cast<uintptr_t>(source), written = reinterpret_cast<uintptr_t>(target);
    void *to = kernel_address(target), *from = kernel_address(source);
    Work copy = [=] { memcpy(to, from, size_bytes); };
    launch(current_stream(), copy, {{read, read + size_bytes}},
           {{written, written + size_bytes}},
           "copy of a storage");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    void* pointer = size_bytes ? allocate_pinned(size_bytes) : nullptr;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
};

DeviceAllocator the_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(kDevice, &the_allocator);

// -- device, streams, events ---------------------------------------------------------------------
StreamId id_of(const c10::Stream& s) { return static_cast<StreamId>(s.id()); }
c10::Stream as_torch(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "a process has one simulated device, index 0");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_torch(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(kCompute); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_torch(new_stream(""));
  }
  c10::Stream getNewStream(c10::Device, int) const override { return as_torch(new_stream("")); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return as_torch(exchange_current_stream(id_of(s)));
  }
  bool queryStream(const c10::Stream& s) const override { return host_asks_stream(id_of(s)); }
  void synchronizeStream(const c10::Stream& s) const override {
    host_waits_for_stream(id_of(s), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { host_waits_for_all("synchronize"); }

  // torch hands an event around as a pointer that is null until it is first recorded.
  static MomentPtr moment_in(void* event) {
    return event == nullptr ? nullptr : *static_cast<MomentPtr*>(event);
  }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new MomentPtr();
    *static_cast<MomentPtr*>(*event) = record_moment(id_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (auto moment = moment_in(event)) stream_waits(id_of(s), moment);
  }
  bool queryEvent(void* event) const override {
    auto moment = moment_in(event);
    return moment == nullptr || host_asks(moment);
  }
  void synchronizeEvent(void* event) const override {
    if (auto moment = moment_in(event)) host_waits_for_moment(moment, "event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    if (data.get() != nullptr) mark_used_by(data.get(), id_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers ------------------------------------------------------------------------------
class Turns {
 public:
  uint64_t take() { return num_taken_++; }
  void wait_for(uint64_t turn) {
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait(lock, [&] { return num_over_ >= turn; });
  }
  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_over_++;
    }
    condition_.notify_all();
  }
  void wait_for_all() {
    WithoutPythonLock released;
    wait_for(num_taken_);
  }

 private:
  std::atomic<uint64_t> num_taken_{0};
  uint64_t num_over_ = 0;
  std::mutex mutex_;
  std::condition_variable condition_;
};

Turns& turns() {
  static Turns* all = new Turns();
  return *all;
}

// A generator of the device, which draws what a CPU generator of the same seed draws.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator on_cpu)
      : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(on_cpu)) {}

  at::Generator inner;

  static c10::DeviceType device_type() { return kDevice; }
  at::Generator& settled() const {
    turns().wait_for_all();
    return const_cast<DeviceGenerator*>(this)->inner;
  }
  void set_current_seed(uint64_t seed) override { settled().set_current_seed(seed); }
  uint64_t current_seed() const override { return settled().current_seed(); }
  uint64_t seed() override { return settled().seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "it is seeded, it has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "it is seeded, it has no offset"); }
  void set_state(const c10::TensorImpl& state) override {
    settled().unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return settled().unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(settled().clone()); }
};

at::Generator new_generator() {
  return at::make_generator<DeviceGenerator>(at::make_generator<at::CPUGeneratorImpl>());
}

const at::Generator& default_generator() {
  static at::Generator* generator = new at::Generator(new_generator());
  return *generator;
}

// -- hooks ---------------------------------------------------------------------------------------
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    resize_storage(storage, size_bytes);
  }
};

}  // namespace

c10::Allocator* device_allocator() { return &the_allocator; }

void resize_storage(const c10::Storage& storage, size_t size_bytes) {
  c10::StorageImpl* resized = storage.unsafeGetStorageImpl();
  size_t kept_bytes = std::min(size_bytes, resized->nbytes());
  c10::DataPtr data = the_allocator.allocate(size_bytes);
  if (kept_bytes && storage.data() != nullptr)
    the_allocator.copy_data(data.get(), storage.data(), kept_bytes);
  resized->set_data_ptr_noswap(std::move(data));
  resized->set_nbytes(size_bytes);
  count("storages resized");
}

Span span_of(const at::Tensor& tensor) {
  if (!tensor.numel() || tensor.storage().data() == nullptr) return {};
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

std::vector<Span> spans_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  for (const at::Tensor& tensor : tensors) spans.push_back(span_of(tensor));
  return spans;
}

at::Tensor for_kernels(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* address = kernel_address(tensor.const_data_ptr());
  at::Tensor seen = at::from_blob(address, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

Work in_random_order(const at::Generator& generator, std::function<void(at::Generator&)> kernel) {
  auto* ours = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours != nullptr, "a random operator on the simulated device takes a generator of ",
              "that device, got one on ", generator.device());
  at::Generator inner = ours->inner;
  uint64_t turn = turns().take();
  return [=]() mutable {
    turns().wait_for(turn);
    kernel(inner);
    turns().end();
  };
}

at::Generator device_generator() { return default_generator(); }

void register_device() {
  open_memory();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace simulated
