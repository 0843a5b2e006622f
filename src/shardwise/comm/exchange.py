"""Small exchanges between ranks, beside the data path: sums, the largest, tensors, objects. Who
waits for one on the host waits with a limit, and says for what (`waits`).

On an accelerator it is the stream that waits, up to the process group's timeout.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.board import ended_ranks
from shardwise.comm.transport import Axis
from shardwise.comm.waits import wait_for
from shardwise.errors import TransportError

Group = dist.ProcessGroup | None  # None: all ranks


def groups_of(*axes: Axis) -> list[Group]:
    """Of the axes that have more than one rank."""
    return [axis.group for axis in axes if axis.size > 1]


def groups_of_mesh(mesh: DeviceMesh, dims: Iterable[int] | None = None) -> list[Group]:
    """Of the dims (all of them by default) that have more than one rank."""
    chosen = range(mesh.ndim) if dims is None else dims
    return [mesh.get_group(dim) for dim in chosen if mesh.size(dim) > 1]


# -- numbers ---------------------------------------------------------------------------------------
def sum_over(tensor: torch.Tensor, groups: Iterable[Group], what: str) -> None:
    """In place, group by group."""
    _reduce(tensor, dist.ReduceOp.SUM, groups, what)


def max_over(tensor: torch.Tensor, groups: Iterable[Group], what: str) -> None:
    """In place, group by group."""
    _reduce(tensor, dist.ReduceOp.MAX, groups, what)


def _reduce(tensor: torch.Tensor, op: Any, groups: Iterable[Group], what: str) -> None:
    for group in groups:
        work = partial(dist.all_reduce, tensor, op, group, async_op=True)
        _run(work, group, what, on_host=tensor.is_cpu)


def gather_tensors(
    own: torch.Tensor, group: Group, what: str, *, limit_s: float | None = None
) -> list[torch.Tensor]:
    """Those of all ranks, of one shape, by rank. `limit_s`: see `wait_for`."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work = partial(dist.all_gather, rows, own, group=group, async_op=True)
    _run(work, group, what, on_host=own.is_cpu, limit_s=limit_s)
    return rows


def broadcast(tensor: torch.Tensor, group: Group, what: str) -> None:
    """All take that of the group's first rank."""
    work = partial(dist.broadcast, tensor, group=group, async_op=True, group_src=0)
    _run(work, group, what, on_host=tensor.is_cpu)


# -- objects: a rank may be busy for long before it has one ----------------------------------------
def gather_objects(own: Any, group: Group, what: str) -> list[Any]:
    """`dist.all_gather_object`, with a wait like others where it goes over Gloo."""
    world = dist.get_world_size(group)
    if "gloo" not in dist.get_backend(group):
        found: list[Any] = [None] * world
        dist.all_gather_object(found, own, group=group)
        return found
    data = _packed(own)
    own_size = torch.tensor([data.numel()], device="cpu")  # also inside of `torch.device("meta")`
    sizes = [torch.zeros_like(own_size) for _ in range(world)]
    work = partial(dist.all_gather, sizes, own_size, group=group, async_op=True)
    _run(work, group, what, heeds_work=True)
    parts = [data.new_empty(int(max(sizes))) for _ in range(world)]
    data = torch.nn.functional.pad(data, (0, int(max(sizes)) - data.numel()))
    work = partial(dist.all_gather, parts, data, group=group, async_op=True)
    _run(work, group, what, heeds_work=True)
    return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_object(own: Any, group: Group, what: str) -> Any:
    """What the group's first rank has, with a wait like others where it goes over Gloo."""
    if "gloo" not in dist.get_backend(group):
        box = [own]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]
    data = _packed(own)
    for moved in (size := torch.tensor([data.numel()], device="cpu"), data):
        if moved is data and dist.get_rank(group):
            moved = data = data.new_empty(int(size))
        work = partial(dist.broadcast, moved, group=group, async_op=True, group_src=0)
        _run(work, group, what, heeds_work=True)
    return _unpacked(data)


def run_later(
    issue: Callable[[], Any], group: Group, what: str, *, on_host: bool
) -> Callable[[], None]:
    """Issue a collective now; who calls what is returned waits for it, as others here do."""
    work = issue()
    return partial(_run, lambda: work, group, what, on_host=on_host)


def _run(
    issue: Callable[[], Any],
    group: Group,
    what: str,
    *,
    on_host: bool = True,
    heeds_work: bool = False,
    limit_s: float | None = None,
) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    try:
        work = issue()
        if work is not None and on_host:
            wait_for(work, what, ranks=ranks, heeds_work=heeds_work, limit_s=limit_s)
        elif work is not None:
            work.wait()
    except TransportError:
        raise
    except RuntimeError as error:  # Gloo's, of a connection
        # Less the place in Gloo's sources.
        first = re.sub(r"^\[\S+\.cc:\d+\] ", "", next(iter(str(error).splitlines()), ""))
        text = f"rank {dist.get_rank()} waited for {what}: {first}\n{ended_ranks(ranks)}"
        raise TransportError(text) from error


def _packed(thing: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
