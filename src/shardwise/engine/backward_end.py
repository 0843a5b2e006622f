"""The end of a backward, once for all contexts that take part in it.

One loss can reach several models (policy and reward, generator and discriminator), each with a
context of its own; their units may share a mesh, and with it the phases of its transport. So their
ends are one: all passes issue what is incomplete, then the reductions that only peers have are
joined, then everything is waited for, delivered and released, and only then control goes back.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from shardwise._torch_compat import at_end_of_backward, outside_transforms
from shardwise.comm.transport import Position, missing_of
from shardwise.errors import DivergenceError

if TYPE_CHECKING:
    from shardwise.engine.backward import BackwardPass
    from shardwise.engine.gradients import BucketGrads


class _Passes(list["BackwardPass"]):
    """Those that end with one graph task, which holds them: an exception lets go of them all."""


_ENDS: weakref.WeakValueDictionary[int, _Passes] = weakref.WeakValueDictionary()  # by graph task


def end_with(task: int, backward: BackwardPass) -> None:
    """Let `backward` take part in the end of a graph task (reentrant checkpointing nests them)."""
    passes = _ENDS.get(task)
    if passes is None:
        passes = _ENDS[task] = _Passes()
        at_end_of_backward(partial(_end, task, passes))
    passes.append(backward)


def forget(backward: BackwardPass) -> None:
    """An exception ended the backward; where an outer one goes on, that is not to end it too."""
    for passes in list(_ENDS.values()):
        if backward in passes:
            passes.remove(backward)


def is_to_end(task: int | None) -> bool:
    """A graph task runs, as far as anybody knows: one that failed lets go of its passes."""
    return task in _ENDS


def _end(task: int, passes: _Passes) -> None:
    """Autograd has run all nodes of a graph task."""
    _ENDS.pop(task, None)  # who comes now, by a hook, gets an end of its own
    ending = [b for b in passes if b.first_task == task]
    outside_transforms(partial(_finish, passes, ending))


def end_now(backward: BackwardPass) -> None:
    """End a pass that no autograd graph belongs to."""
    _finish([backward], [backward])


def _finish(passes: list[BackwardPass], ending: list[BackwardPass]) -> None:
    try:
        for backward in passes:
            backward.flush()
        if ending:
            _join_peers(ending)
        for backward in passes:
            backward.advance_reductions()
        for backward in passes:
            backward.finish_reductions()
            backward.steps.end()
        for backward in ending:
            backward.rest()
        for backward in ending:
            backward.context.end_backward()
    except BaseException:
        for backward in passes:  # now, and not at the next forward: peers wait for this rank
            if backward.context.backward is backward:
                backward.context.abandon()
        raise
    for backward in ending:  # control is the user's again, so a complaint holds up no peer
        backward.check_ledgers()


def _join_peers(ending: list[BackwardPass]) -> None:
    """Take part, with nothing to add, in reductions that only other ranks have (a branch, an expert
    that ran there): this rank owns a shard of their sums too.
    """
    wires = [wire for backward in ending for wire in backward.context.entered[-1]]
    for wire in dict.fromkeys(wires):
        if wire.depth > wires.count(wire):
            continue  # an outer backward goes on, on the same transport
        position = Position(wire.step, "backward", "")
        while buckets := missing_of(wire.transport, position):
            for bucket in buckets:
                grads: BucketGrads | None = bucket.private["grads"]()
                if grads is None:
                    raise DivergenceError(
                        f"{bucket.name}: another rank reduces gradients of this unit, which this "
                        "rank has deleted; keep the same models on all ranks"
                    )
                ending[0].join(grads)
