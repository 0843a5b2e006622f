// As with NCCL: a collective is issued behind what the current stream has queued, runs on the
// stream of its group, and `wait()` makes the current stream wait, not the host. Unless it is given
// a timeout: then the host waits. Tensors must be on the device and contiguous. An asynchronous
// collective holds its tensors until it is waited for.
#include "process_group.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "counters.h"
#include "races.h"
#include "torch_device.h"

namespace simulated {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

struct Collective final : c10d::Work {
  Collective(int rank, OpType type, Tensors outputs, bool is_barrier)
      : c10d::Work(rank, type), outputs_(std::move(outputs)), is_barrier_(is_barrier) {}

  MomentPtr end;
  Tensors held;             // until somebody has waited
  bool is_waited_for = false;  // a synchronous call: the current stream has done so already

  bool isCompleted() override { return host_asks(end); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  void synchronize() override {
    if (!is_waited_for) stream_waits(current_stream(), end);
    held.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) host_waits_for_moment(end, "work.wait with a timeout");
    else if (is_barrier_) host_waits_for_moment(end, "barrier");
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    synchronize();
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device()});
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  Tensors outputs_;
  bool is_barrier_;
};

std::string described(const std::string& name, StreamId on, const Tensors& reads,
                      const Tensors& writes) {
  auto sizes = [](const Tensors& tensors) {
    std::string text;
    for (const Tensor& t : tensors) {
      auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
      text += " " + std::to_string(t.nbytes()) + "@" + std::to_string(address % 16);
    }
    return text;
  };
  return name + " from " + name_of(current_stream()) + " on " + name_of(on) + ": reads" +
         sizes(reads) + ", writes" + sizes(writes);
}

Tensors on_kernels(const Tensors& tensors) {
  Tensors seen;
  for (const Tensor& tensor : tensors) seen.push_back(for_kernels(tensor));
  return seen;
}

class SimulatedGroup final : public c10d::Backend {
 public:
  explicit SimulatedGroup(BackendPtr gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    static std::atomic<int> num_groups{0};
    stream_ = new_stream("group" + std::to_string(num_groups++));
  }

  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return gather_all("all_gather", {out}, {in}, o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& o) override {
    return gather_all("all_gather of " + std::to_string(ins.size()), outs, ins, o.asyncOp);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& o) override {
    return reduce_scatter_all("reduce_scatter", {out}, {in}, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& o) override {
    return reduce_scatter_all("reduce_scatter of " + std::to_string(ins.size()), outs, ins, o);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return reduce_all("all_reduce", tensors, o);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& o) override {
    return reduce_all("all_reduce of " + std::to_string(tensors.size()), tensors, o);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    return run("broadcast", OpType::BROADCAST, {}, tensors, o.asyncOp,
               [gloo = gloo_, all = on_kernels(tensors), o]() mutable {
                 gloo->broadcast(all, o)->wait();
               });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    return run("reduce", OpType::REDUCE, {}, tensors, o.asyncOp,
               [gloo = gloo_, all = on_kernels(tensors), options = o, size = size_]() mutable {
                 bool is_mean = as_sum(options.reduceOp);
                 gloo->reduce(all, options)->wait();
                 if (is_mean) all[0].div_(size);
               });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions& o) override {
    return run("all_gather to a list", OpType::ALLGATHER, ins, outs[0], o.asyncOp,
               [gloo = gloo_, to = std::vector<Tensors>{on_kernels(outs[0])},
                from = on_kernels(ins)]() mutable {
                 gloo->allgather(to, from, c10d::AllgatherOptions())->wait();
               });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins,
                  const c10d::ScatterOptions& o) override {
    Tensors parts = ins.empty() ? Tensors() : ins[0];  // on the source only
    return run("scatter", OpType::SCATTER, parts, outs, o.asyncOp,
               [gloo = gloo_, to = on_kernels(outs), from = on_kernels(parts), o]() mutable {
                 std::vector<Tensors> lists;
                 if (!from.empty()) lists.push_back(from);
                 gloo->scatter(to, lists, o)->wait();
               });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& o) override {
    return run("all_to_all", OpType::ALLTOALL_BASE, {in}, {out}, o.asyncOp,
               [gloo = gloo_, to = for_kernels(out), from = for_kernels(in), out_sizes,
                in_sizes]() mutable {
                 gloo->alltoall_base(to, from, out_sizes, in_sizes, c10d::AllToAllOptions())
                     ->wait();
               });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return run("barrier", OpType::BARRIER, {}, {}, true,
               [gloo = gloo_] { gloo->barrier(c10d::BarrierOptions())->wait(); });
  }

 private:
  // Gloo has no mean. Whether there is one to be taken of the sum.
  static bool as_sum(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }

  WorkPtr gather_all(const std::string& name, const Tensors& outs, const Tensors& ins,
                     bool is_async) {
    return run(name, OpType::_ALLGATHER_BASE, ins, outs, is_async,
               [gloo = gloo_, to = on_kernels(outs), from = on_kernels(ins)]() mutable {
                 for (size_t i = 0; i < to.size(); i++) {
                   Tensor part = from[i].clone();  // it may be a part of the result
                   gloo->_allgather_base(to[i], part, c10d::AllgatherOptions())->wait();
                 }
               });
  }

  WorkPtr reduce_scatter_all(const std::string& name, const Tensors& outs, const Tensors& ins,
                             const c10d::ReduceScatterOptions& o) {
    return run(name, OpType::_REDUCE_SCATTER_BASE, ins, outs, o.asyncOp,
               [gloo = gloo_, to = on_kernels(outs), from = on_kernels(ins),
                options = o, size = size_]() mutable {
                 bool is_mean = as_sum(options.reduceOp);
                 for (size_t i = 0; i < to.size(); i++) {
                   Tensor whole = from[i].clone();  // the result may be a part of it
                   gloo->_reduce_scatter_base(to[i], whole, options)->wait();
                   if (is_mean) to[i].div_(size);
                 }
               });
  }

  template <class Options>
  WorkPtr reduce_all(const std::string& name, const Tensors& tensors, const Options& o) {
    c10d::AllreduceOptions each;
    each.reduceOp = o.reduceOp;
    return run(name, OpType::ALLREDUCE, {}, tensors, o.asyncOp,
               [gloo = gloo_, all = on_kernels(tensors), each, size = size_]() mutable {
                 bool is_mean = as_sum(each.reduceOp);
                 for (Tensor& tensor : all) {
                   Tensors one{tensor};
                   gloo->allreduce(one, each)->wait();
                   if (is_mean) tensor.div_(size);
                 }
               });
  }

  static void check(const std::string& name, const Tensors& tensors) {
    for (const Tensor& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor), "simccl: ", name,
                  ": No backend type associated with device type ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "simccl: ", name, ": tensors must be contiguous");
      TORCH_CHECK(tensor.scalar_type() != at::kShort, "simccl: ", name, ": no dtype int16");
    }
  }

  WorkPtr run(const std::string& name, OpType type, const Tensors& reads, const Tensors& writes,
              bool is_async, simulated::Work kernel) {
    check(name, reads);
    check(name, writes);
    auto work = c10::make_intrusive<Collective>(rank_, type, writes, type == OpType::BARRIER);
    {
      StateLock lock(state_mutex);
      counters().collectives.push_back(described(name, stream_, reads, writes));
    }
    stream_waits(stream_, record_moment(current_stream()));
    launch(stream_, std::move(kernel), spans_of(reads), spans_of(writes), name);
    work->end = record_moment(stream_);
    if (is_async) {
      work->held = reads;
      work->held.insert(work->held.end(), writes.begin(), writes.end());
    } else {
      stream_waits(current_stream(), work->end);
      work->is_waited_for = true;
    }
    return work;
  }

  BackendPtr gloo_;
  StreamId stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<SimulatedGroup>(std::move(gloo));
}

}  // namespace simulated
