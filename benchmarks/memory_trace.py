"""The requests for memory that a training step would make of a device's allocator, noted on a CPU.

    with Recorder() as recorder, recorder.streams_on("cpu"):
        ...
    recorder.trace.replay(CachingAllocator())

A dispatch mode sees each operator's results: a storage that was not known is a request, made on
the stream that is current; one that nobody holds any more is a free, noted before the next
request. `resize_` of a storage (how engines release what was gathered) is seen too. Streams are
named by a module like `torch.cuda`, which takes the place of the CPU's own: it orders nothing, it
only says which stream is current.

What is not seen: memory that an operator takes and gives back inside, which is the same for all
engines of one model, and what a device's kernels would want in another way than the CPU's.

Values do not matter here, so products, attention and the optimizer's arithmetic are left out
(`SHAPES_ONLY`): their results have the right shapes and no contents.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from caching_allocator import CachingAllocator

COMPUTE = "compute"
_ATEN = torch.ops.aten
SHAPES_ONLY = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NOTHING = {_ATEN._fused_adamw_.default}  # writes in place, and nobody looks


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes at the end of a step; peaks are those since the one before."""

    requested_peak: int
    allocated_peak: int
    reserved: int
    num_deferred: int


@dataclass(slots=True)
class Trace:
    """What happened, in the host's order.

    ("malloc", key, bytes, stream)   ("free", key)   ("used", key, stream)   ("step",): all is over
    """

    events: list[tuple[Any, ...]] = field(default_factory=list)

    def at_peak(self) -> Counter[tuple[int, str]]:
        """What is held when most is, in the last step: how many of each size and stream."""
        last = [i for i, (kind, *_) in enumerate(self.events) if kind == "step"][-2:-1]
        held: dict[int, tuple[int, str]] = {}
        total = peak = 0
        found: Counter[tuple[int, str]] = Counter()
        for i, (kind, *what) in enumerate(self.events):
            if kind == "malloc":
                held[what[0]] = what[1], what[2]
                total += what[1]
            elif kind == "free":
                total -= held.pop(what[0])[0]
            if total > peak and i >= (last or [0])[0]:
                peak, found = total, Counter(held.values())
        return found

    def replay(self, allocator: CachingAllocator) -> list[Step]:
        """Give it to an allocator; what it says at the end of each step."""
        blocks: dict[int, Any] = {}
        steps: list[Step] = []
        for kind, *what in self.events:
            if kind == "malloc":
                key, size, stream = what
                blocks[key] = allocator.malloc(size, stream)
            elif kind == "free":
                allocator.free(blocks.pop(what[0]))
            elif kind == "used":
                allocator.record_stream(blocks[what[0]], what[1])
            else:
                allocator.synchronize()
                before = sum(step.num_deferred for step in steps)
                steps.append(
                    Step(
                        allocator.requested_peak,
                        allocator.allocated_peak,
                        allocator.reserved_bytes,
                        allocator.num_deferred - before,
                    )
                )
                allocator.reset_peaks()
        return steps


def _orders_nothing(self: Any, other: Any = None) -> None:
    """On a device one would wait for the other; here there is one order, the host's."""


class Stream:
    """As `torch.cuda.Stream`, with a name."""

    wait_stream = wait_event = synchronize = _orders_nothing

    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self, event: Any = None) -> Event:
        return event or Event()


class Event:
    """As `torch.cuda.Event`, without times."""

    record = wait = synchronize = _orders_nothing

    def query(self) -> bool:
        return True


class StreamModule:
    """As `torch.cuda`, as far as streams go; all else is `torch.cpu`'s."""

    Event = Event

    def __init__(self) -> None:
        self.compute = self.current = Stream(COMPUTE)
        self._numbers = itertools.count(1)

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802 - torch's name
        return Stream(f"stream {next(self._numbers)}")

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def default_stream(self, device: Any = None) -> Stream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@dataclass(eq=False, slots=True)
class _Known:
    alive: StorageWeakRef
    key: int
    size: int
    address: int
    stream: str


class Recorder(TorchDispatchMode):
    """Notes into `trace` while it is entered. `skip_arithmetic=False` computes everything."""

    def __init__(self, *, skip_arithmetic: bool = True) -> None:
        super().__init__()
        self.trace, self.module = Trace(), StreamModule()
        self._skips = skip_arithmetic
        self._known: dict[int, _Known] = {}
        self._ranges: list[tuple[int, int, int]] = []  # address, end, storage; in order
        self._keys = itertools.count()
        self._patches = contextlib.ExitStack()

    # -- from outside ----------------------------------------------------------------------------
    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """What was there before: requests made now, on the compute stream."""
        self._sweep()
        for tensor in tensors:
            self._see(tensor)

    def used(self, tensor: torch.Tensor) -> None:
        """`record_stream` of the current stream."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self.trace.events.append(("used", known.key, self.module.current.name))

    def end_step(self) -> None:
        """The host has waited for the device."""
        self._sweep()
        self.trace.events.append(("step",))

    # -- what it listens to ----------------------------------------------------------------------
    def __enter__(self) -> Recorder:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            self._sweep()
            self._forget(storage._cdata)
            result = resize(storage, size)
            self._see_storage(storage)
            return result

        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operators come here one by one
        kwargs = kwargs or {}
        if self._skips and func in _NOTHING:
            return None
        if self._skips and func in SHAPES_ONLY:
            out = _shapes_only(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        for tensor in tensors_in((args, tuple(kwargs.values()), out)):
            self._see(tensor)
        return out

    # -- storages --------------------------------------------------------------------------------
    def _see(self, tensor: torch.Tensor) -> None:
        for inner in tensors_in(tensor):
            if inner.device.type == "cpu":
                self._see_storage(inner.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        known = self._known.get(key)
        if known is not None and known.size == size:
            return
        start = storage.data_ptr() if size else 0
        end = start + size
        if size and self._lies_in_another(start, end):
            return
        self._sweep()  # frees come before the request that may get their memory
        self._forget(key)
        if not size:
            return
        stream = self.module.current.name
        for _, _, inside in self._ranges_in(start, end):  # parts of it that were known before
            stream = self._known[inside].stream
            self._forget(inside)
        made = _Known(StorageWeakRef(storage), next(self._keys), size, start, stream)
        self._known[key] = made
        bisect.insort(self._ranges, (start, end, key))
        self.trace.events.append(("malloc", made.key, size, stream))

    def _lies_in_another(self, start: int, end: int) -> bool:
        """Whether one that is alive has this memory already, as `from_dlpack` makes them."""
        at = bisect.bisect_right(self._ranges, (start, sys.maxsize, 0)) - 1
        if at < 0 or end > self._ranges[at][1]:
            return False
        return not _is_gone(self._known[self._ranges[at][2]])

    def _ranges_in(self, start: int, end: int) -> list[tuple[int, int, int]]:
        low = bisect.bisect_left(self._ranges, (start, 0, 0))
        return self._ranges[low : bisect.bisect_left(self._ranges, (end, 0, 0))]

    def _sweep(self) -> None:
        for key in [key for key, known in self._known.items() if _is_gone(known)]:
            self._forget(key)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            span = (known.address, known.address + known.size, key)
            del self._ranges[bisect.bisect_left(self._ranges, span)]
            self.trace.events.append(("free", known.key))


def _is_gone(known: _Known, expired: Any = torch.UntypedStorage._expired) -> bool:
    return expired(known.alive.cdata)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All plain tensors in lists, tuples and DTensors; fake ones have no memory."""
    if isinstance(value, DTensor):
        yield from tensors_in(value._local_tensor)
    elif isinstance(value, torch.Tensor):
        if type(value) in _PLAIN:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _shapes_only(func: Any, args: Any, kwargs: Any) -> Any:
    def on(device: str) -> Any:
        return lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)

    args, kwargs = tree_map_only(torch.Tensor, on("meta"), (args, kwargs))
    return tree_map_only(torch.Tensor, on("cpu"), func(*args, **kwargs))
