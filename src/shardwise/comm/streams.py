"""Streams: the one place that orders work on accelerators, and that knows whether there is one.

Two lanes run beside the stream on which the user computes:

    gather   copy-in, all-gather, copy-out       waits for the compute stream when issued, is
                                                 waited for at first use, by its event
    reduce   copy-in, reduce-scatter, all-reduce waits for the compute stream when issued, is
             waited for at the end
    compute  the user's stream

All units and transports of a device share one pair of lanes: an allocator keeps memory by stream,
so what one unit has released serves the next one only where both gather on the same lane.

Lifetimes. A gathered buffer is allocated on the gather lane and read on the compute stream; it is
released by resizing its storage, which hands the block back to the gather lane's pool. The next
gather is issued with `lane("gather")`, which first makes the lane wait for everything that the
compute stream has queued, so the block is never overwritten while a kernel still reads it.
What a stream reads or writes that another one has allocated, and that may be dropped before both
have met again, is named by `used_here`: its memory is not reused before this stream has passed.

On CPU every method does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What engine and transports ask for."""

    is_async: bool  # waiting for a collective inside a lane holds up the lane, not the host

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Run the body on a lane, behind all that the compute stream has queued."""
        ...

    def record(self, name: str) -> Any:
        """An event behind all that a lane has queued."""
        ...

    def wait(self, event: Any) -> None:
        """The compute stream waits for the event."""
        ...

    def used_here(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing the tensor's memory before the current stream has passed
        this point. Free on the stream that it was made on.
        """
        ...


class NoStreams:
    """CPU: there is one order, that of the program."""

    is_async = False
    _nothing = contextlib.nullcontext()

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._nothing

    def record(self, name: str) -> Any:
        return None

    def wait(self, event: Any) -> None:
        return None

    def used_here(self, tensor: torch.Tensor) -> None:
        return None


NO_STREAMS = NoStreams()


class DeviceStreams:
    """CUDA and everything else with `torch.Stream`."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._lanes = {
            "gather": self._module.Stream(device=device, priority=-1),
            "reduce": self._module.Stream(device=device, priority=-1),
        }

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        stream = self._lanes[name]
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            yield

    def record(self, name: str) -> Any:
        return self._lanes[name].record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == self._device.type:  # shards on the host are not the allocator's
            tensor.record_stream(self._module.current_stream(self._device))


# How the streams of a device are made, by its type; another one is `DeviceStreams`.
MAKERS: dict[str, Callable[[torch.device], Streams]] = {
    "cpu": lambda device: NO_STREAMS,
    "meta": lambda device: NO_STREAMS,
}


@functools.cache
def streams_for(device: torch.device) -> Streams:
    """The streams of a device, the same for all who ask; none on CPU."""
    return MAKERS.get(device.type, DeviceStreams)(device)
