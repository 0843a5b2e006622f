"""Steps behind the user's back: a thread steps parameters while the main thread goes on.

    step()            hands units over in the order in which they were waited for the last time,
                      and returns
    next forward      gathers a unit once that has stepped: unit 0 computes while unit 1 steps
    step_in_backward  hands a unit over as soon as its gradients are reduced; at most `LIMIT` wait,
                      so gradients of a few units are there at once

The order of two things that touch a unit is always that of the program:

    handed over  options (learning rate, ...) are copied, the unit's mark counts a write, so kept
                 copies are stale from here on
    finished     the engine waits (`Mark.complete`) before it gathers the unit, and before a phase
                 in which peers may read its shards; so does whoever reads a parameter or one of
                 the gradients that are in use (`ShardTensor` settles first), state, or a checkpoint

What goes wrong in the thread is raised where the main thread waits. On devices the thread works on
a lane of its own, waits as a host for what it needs, and for what it has queued before it says that
it is done: no stream waits for another one on its behalf.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm.streams import Streams, streams_for
from shardwise.engine.tensor.shard_tensor import Mark, ShardTensor

if TYPE_CHECKING:
    from shardwise.offload.optimizer import OffloadedOptimizer, Part

LIMIT = 2  # units that wait for their step in a backward


@dataclass(slots=True)
class Step:
    """A unit's step that is under way. It stands in the place of what is pending of the gradients
    that it reads (`shard_tensor.Pending`); parameters, and views of them, have their mark."""

    behind: Behind
    mark: Mark
    future: Future[None]
    read: list[weakref.ref[ShardTensor]]

    def settle(self) -> None:
        self.behind.finish_unit(self.mark)

    drop = settle  # what is read cannot be taken away before


class Behind:
    """See the module docstring."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._pool = ThreadPoolExecutor(1, "optimizer steps")
        self._steps: dict[Mark, Step] = {}
        self._num_chunks = 0  # for which there is memory
        self._waited: dict[Mark, None] = {}  # for these, in this order, since the last step
        _ALL.add(self)

    # -- handing over ----------------------------------------------------------------------------
    def step(self, gradients: dict[Tensor, Tensor]) -> None:
        """All units that have gradients. Parameters of no unit step at once, since nobody would
        wait for them."""
        units: dict[Mark | None, dict[Tensor, Tensor]] = {}
        for parameter, gradient in gradients.items():
            units.setdefault(_mark_of(parameter), {})[parameter] = gradient
        if None in units:
            optimizer = self._owner()
            self.finish_all()
            optimizer._run(optimizer._part(units.pop(None)))
        first = [units.pop(mark) for mark in self._waited if mark in units]
        self._waited.clear()
        for part in (*first, *units.values()):
            self._submit(part, ready=None)

    def submit(self, gradients: dict[Tensor, Tensor], ready: Any) -> None:
        """A unit, as soon as there is room; `ready`: see `OffloadedOptimizer.step_later`."""
        while len(waiting := self._waiting()) >= LIMIT:
            wait(waiting, return_when=FIRST_COMPLETED)
        self._submit(gradients, ready)

    def _submit(self, gradients: dict[Tensor, Tensor], ready: Any) -> None:
        optimizer = self._owner()
        if not self._num_chunks:
            optimizer.reserve()
        parameters = list(gradients)
        mark = _mark_of(parameters[0])
        assert mark is not None
        part = optimizer._part(gradients)
        if mark.complete is not None:  # another optimizer, of other parameters of the unit
            mark.complete()
        streams = streams_for(_device_of(parameters[0]))
        if len(part.kept.chunks) != self._num_chunks:
            self._num_chunks = len(part.kept.chunks)
            streams.reach(streams.record("compute"))  # whose memory it was before
        if ready is None and streams.is_async:
            ready = streams.record("compute")
        future = self._pool.submit(_run, optimizer, part, streams, ready)
        read = [p.grad for p in parameters if type(p.grad) is ShardTensor]
        step = Step(self, mark, future, [weakref.ref(gradient) for gradient in read])
        for gradient in read:
            gradient._pending = step
        mark.count += 1  # kept copies are stale from here on
        self._steps[mark] = step
        mark.begin_writing(step.settle)

    def _waiting(self) -> list[Future[None]]:
        return [step.future for step in self._steps.values() if not step.future.done()]

    def _owner(self) -> OffloadedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- finishing -------------------------------------------------------------------------------
    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the units of these."""
        for mark in {_mark_of(p) for p in parameters}:
            if mark is not None:
                self.finish_unit(mark)

    def finish_unit(self, mark: Mark) -> None:
        """Wait for a unit's step, and raise what went wrong in it."""
        if (step := self._steps.get(mark)) is None:
            return
        wait([step.future])  # an interrupt here leaves all as it is
        if self._steps.pop(mark, None) is None:
            return  # another thread has waited too
        self._waited[mark] = None
        mark.end_writing()
        for ref in step.read:
            if (gradient := ref()) is not None and gradient._pending is step:
                gradient._pending = None
        step.future.result()

    def finish_all(self) -> None:
        """Wait for all, and raise what went wrong first."""
        if (error := self.end_all()) is not None:
            raise error

    def end_all(self) -> Exception | None:
        """Wait for all; what went wrong first."""
        first = None
        for mark in list(self._steps):
            try:
                self.finish_unit(mark)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                first = first or error
        return first

    def close(self) -> Exception | None:
        """Wait for all, and end the thread; what went wrong."""
        error = self.end_all()
        self._pool.shutdown()
        return error

    def __del__(self) -> None:
        """Nobody waits any more: model and optimizer have gone."""
        for step in getattr(self, "_steps", {}).values():
            step.mark.end_writing()


def _run(optimizer: OffloadedOptimizer, part: Part, streams: Streams, ready: Any) -> None:
    """In the thread. When a unit has failed, those behind it are not stepped."""
    optimizer.raise_failure()
    try:
        _step(optimizer, part, streams, ready)
    except BaseException as error:
        optimizer.note_failure(error)
        raise


@torch.no_grad()
def _step(optimizer: OffloadedOptimizer, part: Part, streams: Streams, ready: Any) -> None:
    streams.reach(ready)
    with streams.lane("copy"):
        optimizer._run(part)
    if streams.is_async:
        streams.reach(streams.record("copy"))


def _wait_before_fork() -> None:
    """A child has no such thread: what it reads is complete by then."""
    for behind in list(_ALL):
        wait([step.future for step in list(behind._steps.values())])


_ALL: weakref.WeakSet[Behind] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork)


def _mark_of(parameter: Tensor) -> Mark | None:
    return getattr(parameter, "_mark", None)


def _device_of(parameter: Tensor) -> torch.device:
    """Where its unit computes; the shard may lie on the host."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)
