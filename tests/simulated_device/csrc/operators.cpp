// Every operator runs as the CPU's kernel, on the thread of the current stream, later.
//
//   shapes of results    from the meta kernel, at once; memory for them from the current pool
//   the kernel itself    over CPU tensors at the kernels' addresses of the same bytes
//
// Where no meta kernel exists the shapes depend on the data, and the host has to wait, as it has
// on a real device (nonzero, equal, masked_select). Bits are those of the CPU, since kernels are.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <optional>
#include <set>

#include "counters.h"
#include "operators.h"
#include "races.h"
#include "torch_device.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The value with each of its tensors replaced.
template <class F>
IValue map_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (Tensor tensor : value.toTensorList()) mapped.push_back(f(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      bool is_there = tensor.has_value() && tensor->defined();
      mapped.push_back(is_there ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

std::string name_of_operator(const c10::FunctionSchema& schema) {
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  return schema.overload_name().empty() ? name : name + "." + schema.overload_name();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack);
  void run(Stack* stack);

 private:
  void take_argument(size_t i);
  void find_returned_arguments();
  bool needs_shapes() const;
  bool find_shapes();
  void match_statistics();
  void resize_outputs();
  void make_results();
  void run_on_host(Stack* stack);
  Work kernel() const;

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  std::vector<IValue> arguments_;
  std::vector<Tensor> reads_, writes_;
  std::optional<size_t> generator_at_;  // of a random operator
  at::Generator generator_;
  std::vector<std::optional<size_t>> returned_;  // result -> the argument that it is
  Stack shapes_;
  std::vector<IValue> results_;
  std::vector<std::vector<Tensor>> outputs_;  // of results that are new, as kernels see them
};

Call::Call(const c10::OperatorHandle& op, Stack* stack)
    : op_(op), schema_(op.schema()), name_(name_of_operator(op.schema())) {
  size_t count = schema_.arguments().size();
  arguments_.assign(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  for (size_t i = 0; i < count; i++) take_argument(i);
  find_returned_arguments();
}

void Call::take_argument(size_t i) {
  const c10::Argument& argument = schema_.arguments()[i];
  IValue& value = arguments_[i];
  if (argument.name() == "generator") {
    generator_at_ = i;
    generator_ = value.isGenerator() ? value.toGenerator() : device_generator();
    value = IValue();
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) value = c10::Device(at::kCPU);
  // As on CUDA: numbers may come from the host, and indices, which are copied; nothing else.
  bool may_be_on_host = starts_with(name_, "index.") || starts_with(name_, "index_put") ||
                        starts_with(name_, "_index_put") || starts_with(name_, "_foreach_addc");
  value = map_tensors(value, [&](const Tensor& tensor) {
    if (!tensor.defined() || is_ours(tensor) || !tensor.is_cpu()) return tensor;
    TORCH_CHECK(tensor.dim() == 0 || may_be_on_host, name_, ": argument '", argument.name(),
                "' is on the CPU, others are on ", the_device(), "; move it there first");
    TORCH_CHECK(!is_written(argument), name_, ": cannot write to a tensor on the CPU from ",
                the_device());
    if (tensor.dim() > 0 && !starts_with(name_, "_foreach")) return tensor.to(the_device());
    Tensor copied = tensor.clone();  // the host may change it before the kernel runs
    bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number) copied.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copied;
  });
  map_tensors(value, [&](const Tensor& tensor) {
    if (is_ours(tensor)) (is_written(argument) ? writes_ : reads_).push_back(tensor);
    return tensor;
  });
}

void Call::find_returned_arguments() {
  for (const c10::Argument& result : schema_.returns()) {
    std::optional<size_t> found;
    if (const c10::AliasInfo* alias = result.alias_info()) {
      TORCH_CHECK(alias->isWrite(), name_, ": this view is unknown to the simulated device");
      for (size_t i = 0; i < arguments_.size(); i++) {
        const c10::Argument& argument = schema_.arguments()[i];
        if (is_written(argument) && argument.alias_info()->beforeSets() == alias->beforeSets())
          found = i;
      }
    }
    returned_.push_back(found);
  }
}

bool Call::needs_shapes() const {
  for (size_t i = 0; i < returned_.size(); i++) {
    if (!returned_[i]) return true;
    // An empty tensor for out= takes the shape of the result.
    const IValue& value = arguments_[*returned_[i]];
    bool is_out = schema_.arguments()[*returned_[i]].is_out();
    if (is_out && value.isTensor() && !value.toTensor().numel()) return true;
  }
  return false;
}

bool Call::find_shapes() {
  auto on_meta = [](const Tensor& tensor) {
    if (!is_ours(tensor) && !(tensor.defined() && tensor.is_cpu() && tensor.dim())) return tensor;
    auto options = tensor.options().device(at::kMeta).pinned_memory(false);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  };
  for (const IValue& value : arguments_)
    shapes_.push_back(value.isDevice() ? IValue(c10::Device(at::kMeta))
                                       : map_tensors(value, on_meta));
  try {
    op_.callBoxed(&shapes_);
    match_statistics();
    return true;
  } catch (const std::exception&) {
    return false;  // no meta kernel, or a mistake, which the CPU's kernel will explain
  }
}

// Norms keep means in float32 on devices, and the CPU's backward wants those of its own forward: in
// the dtype of the input, unless that and the weight differ.
void Call::match_statistics() {
  if (name_ != "native_layer_norm" && name_ != "native_group_norm") return;
  const Tensor& input = arguments_[0].toTensor();
  size_t weight_at = name_ == "native_layer_norm" ? 2 : 1;
  bool has_weight = arguments_[weight_at].isTensor() && arguments_[weight_at].toTensor().defined();
  if (has_weight && arguments_[weight_at].toTensor().scalar_type() != input.scalar_type()) return;
  for (size_t i = 1; i < 3; i++) shapes_[i] = shapes_[i].toTensor().to(input.scalar_type());
}

void Call::resize_outputs() {
  for (size_t i = 0; i < returned_.size(); i++) {
    if (!returned_[i] || !schema_.arguments()[*returned_[i]].is_out()) continue;
    if (!arguments_[*returned_[i]].isTensor()) continue;
    Tensor out = arguments_[*returned_[i]].toTensor();
    if (out.sizes() != shapes_[i].toTensor().sizes()) out.resize_(shapes_[i].toTensor().sizes());
  }
}

void Call::make_results() {
  results_.resize(returned_.size());
  outputs_.resize(returned_.size());
  for (size_t i = 0; i < returned_.size(); i++) {
    if (returned_[i]) {
      results_[i] = arguments_[*returned_[i]];
      continue;
    }
    results_[i] = map_tensors(shapes_[i], [&](const Tensor& shape) {
      if (!shape.defined()) return shape;
      auto options = shape.options().device(the_device());
      Tensor made = at::empty_strided(shape.sizes(), shape.strides(), options);
      writes_.push_back(made);
      outputs_[i].push_back(for_kernels(made));
      return made;
    });
  }
}

// Keeps no tensor of the device: what the host has freed is the allocator's business.
Work Call::kernel() const {
  std::vector<IValue> on_cpu;
  for (const IValue& value : arguments_)
    on_cpu.push_back(
        map_tensors(value, [](const Tensor& t) { return is_ours(t) ? for_kernels(t) : t; }));
  auto run = [op = op_, on_cpu, outputs = outputs_](std::optional<size_t> at, IValue generator) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Stack stack(on_cpu.begin(), on_cpu.end());
    if (at) stack[*at] = std::move(generator);
    op.callBoxed(&stack);
    for (size_t i = 0; i < outputs.size(); i++) {
      size_t next = 0;
      if (outputs[i].empty()) continue;
      map_tensors(stack[i], [&](const Tensor& result) {
        if (result.defined()) outputs[i][next++].copy_(result);
        return result;
      });
    }
  };
  if (!generator_at_) return [run] { run(std::nullopt, IValue()); };
  return in_random_order(generator_,
                         [run, at = generator_at_](at::Generator& inner) { run(at, inner); });
}

void Call::run_on_host(Stack* stack) {
  host_waits_for_stream(current_stream(), name_ + " (its shape or answer depends on the data)");
  for (const IValue& value : arguments_)
    stack->push_back(
        map_tensors(value, [](const Tensor& t) { return is_ours(t) ? for_kernels(t) : t; }));
  note_on_host(current_stream(), spans_of(reads_), spans_of(writes_), name_);
  op_.callBoxed(stack);
  size_t first = stack->size() - returned_.size();
  for (size_t i = 0; i < returned_.size(); i++) {
    IValue& result = (*stack)[first + i];
    if (returned_[i]) {
      result = arguments_[*returned_[i]];
    } else {
      result = map_tensors(
          result, [](const Tensor& t) { return t.defined() ? t.to(the_device()) : t; });
    }
  }
}

void Call::run(Stack* stack) {
  if (needs_shapes()) {
    if (!find_shapes()) return run_on_host(stack);
    resize_outputs();
  }
  make_results();
  launch_made(current_stream(), [this] { return kernel(); }, spans_of(reads_), spans_of(writes_),
              name_);
  for (const IValue& result : results_) stack->push_back(result);
}

void run_on_stream(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Call(op, stack).run(stack);
}

// The CPU's own way to drop out, for equal bits: its fused operator rounds otherwise.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::empty_like(input).fill_(1)};
  Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return {input.mul(noise), noise};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& noise, double) {
  return grad.mul(noise);
}

// Attention takes the way that it takes on the CPU: its fused kernel where it can.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  auto like = [](const Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU))
        .requires_grad_(t.requires_grad());
  };
  std::optional<Tensor> mask_like;
  if (mask.has_value() && mask->defined()) mask_like = like(*mask);
  return at::_fused_sdp_choice(like(query), like(key), like(value), mask_like, dropout, is_causal,
                               scale, enable_gqa);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
}

// One kernel on CUDA, though several on the CPU; and what torch has no way for on other devices.
bool is_one_kernel(const std::string& name) {
  static const std::set<std::string> others{"_chunk_cat", "_chunk_cat.out",
                                            "split_with_sizes_copy.out", "convolution",
                                            "convolution_backward"};
  return starts_with(name, "_foreach_") || others.count(name) > 0;
}

bool makes_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

}  // namespace
}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::choose_attention)
}

namespace simulated {

void register_operators() {
  // Where torch has a way for all devices beside the CPU's own, it would prefer that one.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten",
                                            c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& full_name : dispatcher.getAllOpNames()) {
    if (!starts_with(full_name.name, "aten::")) continue;
    auto op = dispatcher.findSchema(full_name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    std::string name = name_of_operator(op->schema());
    bool has_general =
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    bool prefers_general = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && has_general;
    if ((prefers_general || is_one_kernel(name)) && !makes_view(op->schema()))
      library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  }
}

}  // namespace simulated
