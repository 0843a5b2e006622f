"""Find what accelerator streams would leave unordered, on a CPU and in one process.

The engine runs as on a device whose streams are `Lanes`: they order nothing, and note what would be
ordered. A dispatch mode sees each operator read and write storages. Vector clocks (one entry a
stream) then tell whether one access is ordered behind another:

    mark             the gather lane: lane.clock = max(lane.clock, compute.clock)
    fork reduce      lane.clock = max(lane.clock, compute.clock)
    wait(event)      compute.clock = max(compute.clock, the lane's when the event was recorded)
    collective       on a stream of its process group, behind the stream that issued it
    wait_for(work)   the stream that waits is behind that collective

Two accesses of one storage from two streams, one of them a write, of which neither is ordered
behind the other are a race. So is memory that its allocator may hand out again too early: a storage
that is freed goes back to the pool of the stream that allocated it, and the next allocation of that
stream may get it, unless the streams that used it are ordered.

It looks at storages, not at bytes, and it believes the calls: what a backend does inside of a
collective, and kernels of an operator that run on streams of their own, are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.blocks import Blocks
from shardwise.comm.c10d.transport import C10dTransport

Clock = dict[int, int]
COMPUTE, HOST = 0, 1


@dataclass
class Memory:
    """One storage: who allocated it, and the last accesses of each stream."""

    alive: StorageWeakRef
    owner: int
    start: int
    end: int
    accesses: dict[tuple[int, bool], tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, storage: torch.UntypedStorage, owner: int) -> Memory:
        start = storage.data_ptr()
        return cls(StorageWeakRef(storage), owner, start, start + storage.nbytes())

    def of_others(self) -> dict[tuple[int, bool], tuple[int, str]]:
        """Accesses of other streams, which the allocator does not know of."""
        return {key: access for key, access in self.accesses.items() if key[0] != self.owner}


@dataclass(frozen=True)
class Lent:
    """The memory of another storage, while that lives."""

    alive: StorageWeakRef
    key: int


class Detector:
    """Streams are numbers; 0 is the one on which the user computes, 1 the host itself, which is
    where tensors in host memory are computed with. What it launches comes behind what it has done.
    """

    def __init__(self) -> None:
        self.names = {COMPUTE: "compute", HOST: "the host"}
        self.clocks: dict[int, Clock] = {COMPUTE: {COMPUTE: 0}, HOST: {HOST: 0}}
        self.current = COMPUTE
        self.races: Counter[str] = Counter()
        self.num_launches = 0
        self.is_paused = False
        self._ids = itertools.count(2)
        self._on_host: dict[int, StorageWeakRef] = {}
        self._lent: dict[tuple[int, int], Lent] = {}
        self._memory: dict[int, Memory] = {}
        self._freed: dict[int, list[dict[tuple[int, bool], tuple[int, str]]]] = {}

    # -- streams and events ----------------------------------------------------------------------
    def new_stream(self, name: str) -> int:
        stream = next(self._ids)
        self.names[stream] = name
        self.clocks[stream] = {stream: 0}
        return stream

    def record(self, stream: int) -> Clock:
        self._tick(stream)
        return dict(self.clocks[stream])

    def wait(self, event: Clock, stream: int) -> None:
        clock = self.clocks[stream]
        for other, time in event.items():
            clock[other] = max(clock.get(other, -1), time)

    def _tick(self, stream: int) -> None:
        self.clocks[stream][stream] += 1

    def _is_behind(self, stream: int, other: int, time: int) -> bool:
        return self.clocks[stream].get(other, -1) >= time

    # -- memory ----------------------------------------------------------------------------------
    def _key(self, storage: torch.UntypedStorage) -> int:
        """Storages made by `from_dlpack` have the memory of others, and cannot be resized."""
        own = storage._cdata
        if storage.nbytes() == 0 or storage.resizable():
            return own
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if (known := self._lent.get((start, end))) is not None and not known.alive.expired():
            return known.key
        for key, memory in self._memory.items():
            if not memory.alive.expired() and memory.start <= start and end <= memory.end:
                self._lent[start, end] = Lent(memory.alive, key)
                return key
        return own

    def put_on_host(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = self._key(storage)
        self._on_host[key] = StorageWeakRef(storage)
        # It was the host's before, too.
        self._memory[key] = Memory.of(storage, HOST)

    def are_on_host(self, tensors: list[torch.Tensor]) -> bool:
        """Computing with these is the host's own work."""
        return bool(tensors) and all(map(self._is_on_host, tensors))

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        key = self._key(tensor.untyped_storage())
        known = self._on_host.get(key)
        if known is not None and known.expired():
            del self._on_host[key]
            known = None
        return known is not None

    def launch(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        stream: int | None = None,
    ) -> None:
        """An operator runs on a stream, the current one unless it is named."""
        if self.is_paused:
            return
        stream = self.current if stream is None else stream
        if stream == self.current and self.are_on_host([*reads, *writes]):
            stream = HOST
        else:
            self.wait(self.record(HOST), stream)
        self._tick(stream)
        self.num_launches += 1
        what = f"{name} at {where()}"
        for tensor in reads:
            self._access(tensor.untyped_storage(), stream, what, writes=False)
        for tensor in writes:
            self._access(tensor.untyped_storage(), stream, what, writes=True)

    def copied(self, targets: list[torch.Tensor]) -> None:
        """By a call that does not return before host memory is written."""
        if self.are_on_host(targets):
            self.wait(self.record(self.current), HOST)

    def allocated(self, storage: torch.UntypedStorage, what: str) -> None:
        """An empty storage gets memory of the current stream's pool."""
        self.released(storage)
        self._memory[storage._cdata] = Memory.of(storage, self.current)
        self._reuse(self.current, what)

    def released(self, storage: torch.UntypedStorage) -> None:
        self._free(storage._cdata)

    def sweep(self) -> None:
        """Free what nobody holds any more."""
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            self._free(key)

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None or memory.owner == HOST:
            return  # pinned memory knows who copies from it
        if left := memory.of_others():
            self._freed.setdefault(memory.owner, []).append(left)

    def _access(
        self, storage: torch.UntypedStorage, stream: int, what: str, *, writes: bool
    ) -> None:
        if storage.nbytes() == 0:
            return
        key = self._key(storage)
        memory = self._memory.get(key)
        if memory is not None and memory.alive.expired():
            self._free(key)
            memory = None
        if memory is None:
            memory = self._memory[key] = Memory.of(storage, stream)
            self._reuse(stream, what)
        for (other, wrote), (time, before) in memory.accesses.items():
            if other != stream and (wrote or writes) and not self._is_behind(stream, other, time):
                self._report(other, wrote, before, stream, "writes" if writes else "reads", what)
        memory.accesses[stream, writes] = (self.clocks[stream][stream], what)

    def _reuse(self, stream: int, what: str) -> None:
        """An allocation may take any block of its stream's pool: which one is chance."""
        for left in self._freed.pop(stream, []):
            for (other, wrote), (time, before) in left.items():
                if not self._is_behind(stream, other, time):
                    self._report(other, wrote, before, stream, "reuses the memory", what)

    def _report(
        self, other: int, wrote: bool, before: str, stream: int, does: str, what: str
    ) -> None:
        names = self.names
        did = "writes" if wrote else "reads"
        self.races[f"{names[other]} {did} ({before}); {names[stream]} {does} ({what})"] += 1


def where() -> str:
    """The innermost functions of shardwise that run, for a report."""
    frame: Any = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        path = frame.f_code.co_filename
        if "/shardwise/" in path:
            found.append(f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "the user's code"


class Lanes:
    """The streams of a device, for the engine and its transports. `left_out` names what a mutant
    does not do: "fork reduce", and "mark", "wait" or "land" in a function.
    """

    is_async = True

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._lanes = {name: detector.new_stream(name) for name in ("gather", "reduce", "copy")}
        self._copied: Clock | None = None
        self.left_out: set[str] = set()
        self.seen: set[str] = set()

    @contextlib.contextmanager
    def users(self, num: int) -> Iterator[list[Callable[[], Any]]]:
        """More streams on which the user computes, to be entered; at the end all are waited for."""
        detector = self._detector
        made = [detector.new_stream(f"user {i}") for i in range(num)]
        for stream in made:
            detector.wait(detector.record(detector.current), stream)
        yield [functools.partial(self._on, stream) for stream in made]
        for stream in made:
            detector.wait(detector.record(stream), detector.current)

    @contextlib.contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        before, self._detector.current = self._detector.current, stream
        try:
            yield
        finally:
            self._detector.current = before

    def _does(self, what: str) -> bool:
        self.seen.add(what)
        return what not in self.left_out

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        detector, lane = self._detector, self._lanes[name]
        if name == "reduce" and self._does("fork reduce"):
            detector.wait(detector.record(detector.current), lane)
        with self._on(lane):
            yield

    def mark(self) -> None:
        if self._does(f"mark in {caller()}"):
            detector = self._detector
            detector.wait(detector.record(detector.current), self._lanes["gather"])

    def record(self, name: str) -> Any:
        stream = self._detector.current if name == "compute" else self._lanes[name]
        return self._detector.record(stream)

    def wait(self, event: Any) -> None:
        if event is not None and self._does(f"wait in {caller()}"):
            self._detector.wait(event, self._detector.current)

    def on_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        self._detector.put_on_host(tensor)
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def to_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._detector.put_on_host(host)
        host.copy_(tensor, non_blocking=True)
        self._copied = self._detector.record(self._detector.current)
        return host

    def reach(self, event: Any) -> None:
        if event is not None and self._does(f"reach in {caller()}"):
            self._detector.wait(event, HOST)

    def land(self) -> None:
        if self._copied is not None and self._does(f"land in {caller()}"):
            self._detector.wait(self._copied, HOST)
            self._copied = None


def caller() -> str:
    """Who called the function that asks."""
    return sys._getframe(2).f_code.co_qualname


class LaneBlocks(Blocks):
    """Memory of gathered copies and staging: always resized, and the detector is told."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    def fill(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        storage.resize_(size_bytes)
        self._detector.allocated(storage, f"an allocation at {where()}")

    def empty(self, storage: torch.UntypedStorage) -> None:
        self._detector.released(storage)
        storage.resize_(0)


class Operators(TorchDispatchMode):
    """Tells the detector what each operator reads and writes."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector
        self.collective: Callable[[str, list[Any], list[Any]], None] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does comes here, operator by operator
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        space, _, name = schema.name.partition("::")
        if space == "profiler" or name in ("detach", "record_stream", "set_"):
            return out
        if space == "c10d":
            # All of ours write to their first argument; reductions in place have no other.
            written = tensors_in(args[0])
            read = tensors_in(args[1]) if len(args) > 1 else []
            if self.collective is not None:
                self.collective(name, read, written)
            return out
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return out  # a view
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(tensors_in(value))
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        made = [t for t in tensors_in(out) if t.untyped_storage()._cdata not in known]
        if self._detector.are_on_host([*reads, *writes]):
            for tensor in made:
                self._detector.put_on_host(tensor)
        writes += made
        self._detector.sweep()
        self._detector.launch(name, reads, writes)
        if name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            self._detector.copied(writes)
        return out


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Plain tensors; what a subclass does arrives as operators on its own."""
    if isinstance(value, torch.Tensor):
        return [value] if type(value) in (torch.Tensor, torch.nn.Parameter) else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def transport_class(
    detector: Detector, operators: Operators, left_out: set[str]
) -> type[C10dTransport]:
    """c10d with a stream for each process group, as NCCL has it. `left_out`: "work of gather" and
    "work of reduce" are not waited for.
    """
    groups: dict[int, int] = {}
    events: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()

    class LaneTransport(C10dTransport):
        def _issue(self, bucket: Any, call: Callable[..., Any], *args: Any) -> Any:
            stream = groups.get(id(args[-1]))
            if stream is None:
                stream = groups[id(args[-1])] = detector.new_stream("group")

            def collective(name: str, read: list[Any], written: list[Any]) -> None:
                detector.wait(detector.record(detector.current), stream)
                detector.launch(name, read, written, stream)

            operators.collective = collective
            try:
                work = super()._issue(bucket, call, *args)
            finally:
                operators.collective = None
            events[work] = detector.record(stream)
            return work

        def agree(self, flags: list[bool]) -> list[bool]:
            detector.is_paused = True  # hosts among themselves
            try:
                return super().agree(flags)
            finally:
                detector.is_paused = False

        def wait_for(self, work: Any, what: str, *, on_host: bool = False) -> None:
            detector.is_paused = True  # what a CPU backend copies on the way is its own
            try:
                super().wait_for(work, what, on_host=on_host)
            finally:
                detector.is_paused = False
            if f"work of {what.partition(' ')[0]}" not in left_out and work in events:
                detector.wait(events[work], detector.current)

    return LaneTransport
