"""The only file that imports private torch names. Each entry says why the public API does not do.

Tested on every supported torch version by tests/test_torch_compat.py.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# Tensors with sizes and no memory, which go through kernels' shape functions on any device.
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: F401
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

# Sees every operator, the collectives of C++ reducers included; there is no public name.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # noqa: F401

T = TypeVar("T")

# The id of the graph task that runs on this thread: tells "inside a backward" and which one. No
# public API says so.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of one


def graph_task() -> int | None:
    """Id of the backward that runs on this thread, None outside of one."""
    task = graph_task_id()
    return None if task == -1 else task


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward has executed all its nodes.

    The public hooks fire per tensor or per node; only the engine's own callback fires once, at the
    very end.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def around_backwards(around: Callable[..., Any]) -> None:
    """Let every backward that Python starts, by whatever function, run as
    `around(run, outputs, *args, **kwargs)`. No public hook fires before a backward, nor when one
    fails. Torch's own tracing replaces the same two names, and puts back what it found.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return around(run, outputs, *args, **kwargs)

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = engine_run_backward  # type: ignore[attr-defined]


def in_functional_call() -> bool:
    """Whether `torch.func.functional_call` runs: what is in the place of parameters goes away
    again. It leaves no word but its frame.
    """
    frame = sys._getframe()
    code = torch.nn.utils.stateless._functional_call.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


# (tensors, versions): sets version counters, which autograd compares when it unpacks saved tensors.
# `torch.autograd._unsafe_preserve_version_counter` is built on it, but only restores what it found.
set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)


# Not None inside vmap, grad, jvp, ...: outputs are then wrapped, and tensor hooks do not reach the
# plain tensors. No public name tells.
functorch_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def outside_transforms(call: Callable[[], T]) -> T:
    """`call()` without vmap, grad, jvp, ...: what the engine copies is no part of the function that
    they transform, and inside of them a write into a captured buffer is an error.
    """
    if functorch_transform() is None:
        return call()
    with temporarily_clear_interpreter_stack():
        return call()


def spec_of(tensor: Any) -> Any:
    """The `DTensorSpec` of a DTensor. Passing it on makes a new DTensor in 3 us; `from_local`
    takes 22 us.
    """
    return tensor._spec


def local_of(tensor: Any) -> torch.Tensor:
    """The stored part, without the autograd node that `to_local()` adds."""
    return tensor._local_tensor


def new_dtensor(
    cls: type[DTensor], local: torch.Tensor, spec: Any, requires_grad: bool = False
) -> Any:
    """A DTensor (or subclass) over `local`, without checks and communication.

    The wrapper takes the storage offset of what it is made of, and a wrapper with an offset reports
    a data_ptr() although it has no memory: torch's asynchronous checkpointing would copy from it.
    So one over a view into a bucket is made of an empty tensor.
    """
    if type(local) is not torch.Tensor or not local.storage_offset():
        return DTensor.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
    made = DTensor.__new__(
        cls,
        _nothing_like(local),
        spec,
        requires_grad=requires_grad,  # type: ignore[call-arg]
    )
    made._local_tensor = local
    return made


def new_dtensors(
    cls: type[DTensor], locals_: Sequence[torch.Tensor], specs: Sequence[Any]
) -> list[Any]:
    """`new_dtensor` for several plain tensors of one dtype."""
    empty = _nothing_like(locals_[0])
    made = []
    for local, spec in zip(locals_, specs, strict=True):
        new: Any = DTensor.__new__(cls, empty, spec, requires_grad=False)  # type: ignore[call-arg]
        new._local_tensor = local
        made.append(new)
    return made


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of no elements, one for each dtype and device."""
    key = (tensor.dtype, tensor.device)
    empty = _EMPTY.get(key)
    if empty is None:
        with torch.inference_mode(False):
            empty = _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """The spec of a DTensor that does not exist yet. `DTensor.from_local` makes one too, but not
    for every placement (strided shards), and wants the local tensor.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process. Its counters have no public name."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor only wraps others, whose names it gives (`__tensor_flatten__`)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def strided_shard(dim: int, split_factor: int) -> Any:
    """The placement of a dim that an inner mesh dim has cut into `split_factor` parts before.
    There is no public name for what FSDP2 itself gives such parameters.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement: Any) -> bool:
    """True for `strided_shard`'s; it is no subclass of `Shard`, and `is_shard()` denies it."""
    return hasattr(placement, "split_factor")


def joined_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose dims are those of several slices of one parent. Slicing the parent by name
    gives the same only for dims that have names and kept their order.
    """
    return DeviceMesh._concatenate(meshes)


def flattened_mesh(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """All dims of a mesh as one. No public name yet."""
    return mesh._flatten(name)


def unflattened_mesh(
    mesh: DeviceMesh, dim: int, sizes: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    """One dim of a mesh as several. A mesh made anew would need the ranks of all slices."""
    return mesh._unflatten(dim, sizes, names)


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """A local tensor whose collective is over: DTensor leaves waiting to the first use."""
    wait = getattr(tensor, "wait", None)  # AsyncCollectiveTensor
    return wait() if wait is not None else tensor


def post_accumulate_hooks(tensor: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """The hooks that `register_post_accumulate_grad_hook` stored, which the engine runs for
    sharded parameters.
    """
    return tuple((tensor._post_accumulate_grad_hooks or {}).values())


def add_accumulation_hook(
    leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> tuple[dict[int, Callable[[torch.Tensor], None]], int]:
    """Register a hook for when a gradient has been accumulated; returns the dict of such hooks and
    the hook's place in it, where it may be replaced.
    """
    handle = leaf.register_post_accumulate_grad_hook(hook)
    return leaf._post_accumulate_grad_hooks, handle.id  # type: ignore[return-value]


def hooks_of(leaf: torch.Tensor) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The dicts in which a leaf keeps its hooks, those on its gradient and those behind the
    accumulation. Handles of hooks remove them there, so forms of one parameter share the dicts.
    """
    kept: Any = leaf
    return kept._backward_hooks or OrderedDict(), kept._post_accumulate_grad_hooks or OrderedDict()


def share_hooks(leaf: Any, hooks: tuple[OrderedDict[int, Any], OrderedDict[int, Any]]) -> None:
    """Let a leaf keep its hooks in these dicts."""
    leaf._backward_hooks, leaf._post_accumulate_grad_hooks = hooks


def repoint(tensor: Any, local: torch.Tensor, spec: Any) -> None:
    """Another stored part, and how it lies, for a DTensor that others hold. No public call does."""
    tensor._local_tensor, tensor._spec = local, spec


def tensor_hooks(tensor: torch.Tensor) -> Sequence[Callable[[torch.Tensor], torch.Tensor | None]]:
    """The hooks that `register_hook` stored on a leaf."""
    return tuple((tensor._backward_hooks or {}).values())


def plain_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the memory of a subclass instance. `as_subclass(torch.Tensor)` alone is
    converted back by the default `__torch_function__`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


# (destinations, sources), none empty: one call for many tensors costs the host 0.5 us for each; a
# loop over `copy_` 2 to 3 us.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_


def chunk_cat(tensors: list[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Row r of `out` becomes the r-th chunks (along dim 0) of all tensors, end to end. One call
    where public ones take a view and a copy for each tensor.
    """
    torch._chunk_cat(tensors, 0, num_chunks, out=out)


# (flat, like): views of a flat tensor, one after the other, in the shapes of `like`; none may be
# empty. The public `torch.split` makes flat ones, and costs twice as much.
unflatten: Callable[[torch.Tensor, list[torch.Tensor]], Sequence[torch.Tensor]] = (
    torch._C._nn.unflatten_dense_tensors
)


# One call for many small tensors. torch.optim builds on these; there is no public name.
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def num_dispatch_modes() -> int:
    """How many `TorchDispatchMode`s are active on this thread."""
    return torch._C._len_torch_dispatch_stack()


def dispatch_modes() -> list[Any]:
    """The active modes. They are public, a way to see whether one is active is not."""
    return [torch._C._get_dispatch_stack_at(i) for i in range(num_dispatch_modes())]


# What new frames on this thread are handed to: dynamo below a `torch.compile`, else None. No public
# name tells. A C function, so that asking makes no frame for dynamo to look at.
frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def with_frame_callback(callback: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose frames are handed to `callback`, also when it is called from code that
    `torch.compiler.disable` keeps from dynamo. The public switch has no inner "on".
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch._C._dynamo.eval_frame.set_eval_frame(callback)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    return call


def register_composable(module: nn.Module, name: str) -> None:
    """Note in torch's registry of composable APIs that `name` was applied to `module`.

    `replicate` leaves modules alone that `fully_shard` manages; it looks nowhere else.
    """
    registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry[name] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Whether DDP reduces the gradients of `module`, as a wrapper or by `replicate`."""
    composed = module.__dict__.get(REGISTRY_KEY, ())
    return "replicate" in composed or isinstance(module, nn.parallel.DistributedDataParallel)


def default_store() -> dist.Store | None:
    """The store of the default process group: ranks can meet there without a collective.

    None for the backends of torch's own tests: one rank alone ("fake"), or ranks that are threads
    of one process ("threaded"), whose works cannot be waited for with a time limit.
    """
    if not dist.is_initialized() or dist.get_backend() in ("fake", "threaded"):
        return None
    return dist.distributed_c10d._get_default_store()


def open_fake_group(world: int) -> None:
    """A default group of torch's own tests: this process is rank 0 of `world`, nothing moves."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Tensors and storage objects that share this memory; `sys.getrefcount` of C++. No public
    name.
    """
    return torch._C._storage_Use_Count(storage._cdata)


# What torch.distributed hands to a process group with an all-gather, or a reduce-scatter that sums.
ALL_GATHER = torch._C._distributed_c10d.AllgatherOptions()
ALL_GATHER.asyncOp = True
REDUCE_SCATTER = torch._C._distributed_c10d.ReduceScatterOptions()
REDUCE_SCATTER.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
REDUCE_SCATTER.asyncOp = True


_swap_memory: Callable[..., None] | None = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


def swap_memory(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    """Exchange memory and size of two storages, one of which is empty, or both as large; tensors
    over them stay where they are. No public call does that. False where this torch has none.
    """
    if _swap_memory is not None:
        _swap_memory(a, b)
    return _swap_memory is not None


def backend_name(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Which serves a device: "gloo", "nccl"; `dist.get_backend` names one for the whole group.
    Empty where the group has none: torch's ranks as threads.
    """
    backend = backend_of(group, device)
    return "" if backend is None else backend.name()


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """What serves a device in a group; None where the group has nothing for it."""
    try:
        return (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
    except RuntimeError:
        return None


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Of a group's collectives, where its backend says so."""
    options = getattr(backend_of(group, device), "options", None)
    return getattr(options, "_timeout", None)


def coalesces(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the backend that serves a device starts several collectives as one."""
    return bool(getattr(backend_of(group, device), "supports_coalescing", False))


def all_gather_call() -> Any:
    """torch's function for one tensor: older names warn since 2.13, newer ones do not exist before.
    Looked up at each call, since tools replace it.
    """
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def symmetric_memory() -> Any:
    """The module: public names of a private one. Imported when it is used, for it starts much."""
    import torch.distributed._symmetric_memory as module

    return module


# -- what torch says in words only ---------------------------------------------------------------
_VERSION = re.compile(r"inplace operation: \[[\w.]+ \[([\d, ]*)\]\].* is at version (\d+)")


def written_since(error: BaseException) -> tuple[int, int] | None:
    """Elements and version of the tensor that autograd's error is about, which was written after it
    was saved; None for other errors. No error class tells.
    """
    found = _VERSION.search(str(error)) if type(error) is RuntimeError else None
    if found is None:
        return None
    return math.prod(map(int, filter(None, found[1].split(", ")))), int(found[2])


def says_mixed(error: BaseException) -> bool:
    """DTensor refuses plain tensors beside DTensors; no error class tells."""
    return "mixed torch.Tensor and DTensor" in str(error)


def says_uneven(error: BaseException) -> bool:
    """DTensor refuses to flatten a dim that is cut unevenly; no error class tells."""
    return "Cannot flatten unevenly sharded" in str(error)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf into which a node of a graph adds a gradient; None for other nodes. The class has no
    public name.
    """
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


# -- what only the stack tells -------------------------------------------------------------------
def modules_running() -> Iterator[nn.Module]:
    """Modules whose forward is on this thread's stack, innermost first. A module does not know its
    parents; the frames of `nn.Module._call_impl` do, at the moment that matters.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back


def in_parametrization() -> bool:
    """Whether torch computes a parametrization now, or removes one. Asked behind an error only."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != parametrize.__name__:
        frame = frame.f_back
    return frame is not None
