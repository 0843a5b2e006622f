"""Streams: the one place that orders work on accelerators, and that knows whether there is one.

Three lanes run beside the stream on which the user computes:

    gather   all-gather, copy-out         waits for the compute stream where that says so (`mark`);
                                          is waited for at each use, by its event
    reduce   reduce-scatter, all-reduce   waits for the compute stream when issued, which has packed
             the gradients by then; is waited for when its memory is wanted, or at the end
    copy     shards, gradients and state  runs for a thread that steps parameters behind the user's
             on their way to the host     back (`offload`), which waits for it as a host
    compute  the user's stream: the one that is current when it calls. There may be several

All units and transports of a device share the lanes: an allocator keeps memory by stream, so what
one unit has released serves the next one only where both gather on the same lane.

Lifetimes follow from events; no memory is left to the allocator to watch (`record_stream`). A
gathered buffer is allocated on the gather lane and read on the compute stream; it is released by
resizing its storage, which hands the block back to the gather lane's pool. The compute stream marks
that point, and the next gather begins behind it, so the block is never overwritten while a kernel
still reads it. It marks the begin of each forward too, behind which shards are not written. Packed
gradients, and gradients that are reduced where they are, are let go of once the reduce lane has
waited for their collective; the compute stream waits for the lane before it allocates again.

Host memory. What a lane copies there (`to_host`) is complete when the host has waited (`land`).
Nobody else asks whether a tensor is on the device.

On CPU every method does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What engine and transports ask for."""

    is_async: bool  # waiting for a collective inside a lane holds up the lane, not the host

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Run the body on a lane: "gather" behind all marks, "reduce" behind all that the compute
        stream has queued, "copy" behind nothing: the host has waited (`reach`).
        """
        ...

    def mark(self) -> None:
        """What is gathered from here on comes behind all that the compute stream has queued."""
        ...

    def record(self, name: str) -> Any:
        """An event behind all that a lane has queued, or the compute stream ("compute")."""
        ...

    def wait(self, event: Any) -> None:
        """The compute stream waits for the event."""
        ...

    def on_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """A tensor in host memory that lanes are to copy from; itself, or pinned."""
        ...

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on the device of what is in host memory, by the current stream; else itself."""
        ...

    def to_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """A copy in host memory, by the current stream; not to be read before `land`."""
        ...

    def land(self) -> None:
        """The host waits for what `to_host` has copied since, in this thread."""
        ...

    def reach(self, event: Any) -> None:
        """The host waits for the event."""
        ...


class NoStreams:
    """CPU: there is one order, that of the program."""

    is_async = False
    _nothing = contextlib.nullcontext()

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._nothing

    def mark(self) -> None:
        return None

    def record(self, name: str) -> Any:
        return None

    def wait(self, event: Any) -> None:
        return None

    def on_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        return tensor

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        return tensor

    def land(self) -> None:
        return None

    def reach(self, event: Any) -> None:
        return None


NO_STREAMS = NoStreams()


class DeviceStreams(NoStreams):
    """CUDA and everything else with `torch.Stream`."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lanes = {
            "gather": self._module.Stream(device=device, priority=-1),
            "reduce": self._module.Stream(device=device, priority=-1),
            "copy": self._module.Stream(device=device),
        }
        self._latest = threading.local()  # `copied`: an event behind the latest copy to the host

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        stream = self._lanes[name]
        if name == "reduce":
            stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            yield

    def mark(self) -> None:
        self._lanes["gather"].wait_stream(self._module.current_stream(self._device))

    def record(self, name: str) -> Any:
        is_user = name == "compute"
        stream = self._module.current_stream(self._device) if is_user else self._lanes[name]
        return stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    def on_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        return tensor.pin_memory() if pinned else tensor

    def to_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=True)
        self._latest.copied = self._module.current_stream(self._device).record_event()
        return host

    def land(self) -> None:
        self.reach(getattr(self._latest, "copied", None))
        self._latest.copied = None

    def reach(self, event: Any) -> None:
        if event is not None:
            event.synchronize()


# How the streams of a device are made, by its type; another one is `DeviceStreams`.
MAKERS: dict[str, Callable[[torch.device], Streams]] = {
    "cpu": lambda device: NO_STREAMS,
    "meta": lambda device: NO_STREAMS,
}


@functools.cache
def streams_for(device: torch.device) -> Streams:
    """The streams of a device, the same for all who ask; none on CPU."""
    return MAKERS.get(device.type, DeviceStreams)(device)
