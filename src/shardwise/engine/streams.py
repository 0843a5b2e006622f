"""Streams: the one place where the engine orders work on accelerators.

Three lanes run beside the stream on which the user computes:

    gather   copy-in, all-gather, copy-out       waits for the compute stream when issued, is
                                                 waited for at first use, by its event
    reduce   copy-in, reduce-scatter, all-reduce waits for the compute stream when issued, is
             waited for at the end
    compute  the user's stream

Lifetimes. A gathered buffer is allocated on the gather lane and read on the compute stream; it is
released by resizing its storage, which hands the block back to the gather lane's pool. The next
gather is issued with `lane("gather")`, which first makes the lane wait for everything that the
compute stream has queued, so the block is never overwritten while a kernel still reads it.
Gradients are made on the compute stream and read on the reduce lane: their owner (`GradBuffer`)
    keeps them until its handle is waited for, so no `record_stream` is needed.

On CPU every method does nothing. `RecordingStreams` notes the calls instead, for golden tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """What the engine asks for."""

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


class RecordingStreams:
    """Writes down what would be ordered: `fork gather`, `join gather`, `event gather`, `wait
    gather`.
    """

    is_async = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        self.calls.append(f"fork {name}")
        yield
        self.calls.append(f"join {name}")

    def record(self, name: str) -> Any:
        self.calls.append(f"event {name}")
        return name

    def wait(self, event: Any) -> None:
        self.calls.append(f"wait {event}")


def streams_for(device: torch.device) -> Streams:
    """Streams of a device; none on CPU."""
    if device.type in ("cpu", "meta"):
        return NoStreams()
    return DeviceStreams(device)
