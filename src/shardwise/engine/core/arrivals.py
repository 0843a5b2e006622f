"""How the engine learns that autograd has put gradients into full parameters.

    heard    a hook on each full parameter: the gradient goes into the reduction at once. Large ones
             are always heard, so that their memory is free as soon as they are copied
    quiet    once a backward has reached a unit, small parameters are not heard one by one (a hook
             costs as much as all the rest that is done for a small gradient): the accumulators are
             looked at together when the backward leaves the unit, and at its end

`watch` also sees to it that all forms of a parameter agree on `requires_grad`. Users set it on the
form that modules hold, which is the shard or the full parameter, before a forward or behind it: the
form that has changed since they were last looked at wins. They are looked at before each use and
before each backward (`guards.backwards`), so that autograd finds what a plain model would show it.

Hooks are quiet only between a unit's first sign of a backward and the end of that backward, so a
gradient that comes without any other sign is always heard. Autograd fills an accumulator once for
each backward, so what is found there is whole.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import add_accumulation_hook
from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.gradients import BucketGrads
    from shardwise.engine.core.parameter import ShardedParam
    from shardwise.engine.core.unit import Unit

SMALL_BYTES = 2**18  # of one gradient
ALL_SMALL_BYTES = 2**20  # of those of a bucket that wait together

Hook = Callable[[torch.Tensor], None]

# What is asked of all parameters of a bucket is asked by one `map`, which stays in C.
_trains = attrgetter("sharded.requires_grad", "full.requires_grad")
_flag = attrgetter("requires_grad")
_not_heard: Hook = deque(maxlen=0).append  # does nothing, without leaving C


class Arrivals:
    """Of one bucket. Hooks hold nothing: they keep no deleted model alive."""

    def __init__(self, state: BucketState) -> None:
        self._state = state
        self.has_frozen = True  # some parameters get no gradient
        self._trainable = 0  # the others, as a mask
        self._forms = -1  # of the bucket, when hooks were set
        self._flags: tuple[tuple[bool, ...], ...] = ()  # of all forms, when last looked at
        self._hooked: set[int] = set()
        self._small: list[tuple[int, ShardedParam]] = []
        self._small_bytes = 0
        self._small_hooks: list[tuple[dict[int, Hook], int, Hook]] = []  # hooks, place, the heard
        self._is_quiet = False

    def watch(self, grads: BucketGrads) -> int:
        """See to it that `grads` hears of gradients; returns the mask of parameters with one."""
        state = self._state
        found = _flags_of(state) if state.between else tuple(map(_trains, state.params))
        if found == self._flags and self._forms == self._state.num_forms:
            return self._trainable
        if self._forms != state.num_forms:
            self._forms = state.num_forms
            self._flags = ()
            self._hooked.clear()
            self._small, self._small_hooks, self._small_bytes = [], [], 0
        trainable = 0
        for i, param in enumerate(state.params):
            if _agree(param, self._flags[i][0] if self._flags else None):
                trainable |= 1 << i
                if i not in self._hooked:
                    self._hook(grads, i, param)
        self._flags = _flags_of(state) if state.between else tuple(map(_trains, state.params))
        everything = (1 << len(state.params)) - 1
        self._trainable, self.has_frozen = trainable, trainable != everything
        return trainable

    def watch_again(self, grads: BucketGrads) -> None:
        """The same for forms that were watched before; others have no flags to agree on."""
        state = self._state
        if self._forms == state.num_forms and (
            state.between or tuple(map(_trains, state.params)) != self._flags
        ):
            grads.tally.trainable = self.watch(grads)

    def _hook(self, grads: BucketGrads, index: int, param: ShardedParam) -> None:
        self._hooked.add(index)
        heard = _hook_for(grads, index)
        hooks, place = add_accumulation_hook(param.full, heard)
        size = param.full.numel() * param.full.element_size()
        if size <= SMALL_BYTES and self._small_bytes + size <= ALL_SMALL_BYTES:
            self._small.append((index, param))
            self._small_bytes += size
            self._small_hooks.append((hooks, place, heard))

    # -- in a backward ---------------------------------------------------------------------------
    def be_quiet(self) -> None:
        """From here to `be_heard`, whoever leaves the unit asks for `unheard`."""
        if not self._is_quiet:
            self._is_quiet = True
            for hooks, place, _ in self._small_hooks:
                hooks[place] = _not_heard

    def be_heard(self) -> None:
        """The backward is over."""
        if self._is_quiet:
            self._is_quiet = False
            for hooks, place, heard in self._small_hooks:
                hooks[place] = heard

    def unheard(self) -> list[int]:
        """Parameters that autograd has put a gradient into without anybody being told."""
        return [i for i, param in self._small if param.full.grad is not None]


def _flags_of(state: BucketState) -> tuple[tuple[bool, ...], ...]:
    return (*map(_trains, state.params), tuple(map(_flag, state.between)))


def _agree(param: ShardedParam, before: bool | None) -> bool:
    """Whether a parameter trains; all its forms say so from here on. `before`: what they said when
    they were last looked at.
    """
    forms = [f for f in (param.sharded, param.full, param.between) if f is not None]
    trains = param.sharded.requires_grad
    if before is not None:
        trains = before != any(f.requires_grad != before for f in forms)
    for form in forms:
        if form.requires_grad != trains:
            form.requires_grad_(trains)
    return trains


def _hook_for(grads: BucketGrads, index: int) -> Hook:
    ref, unit_ref, own = weakref.ref(grads), grads.state.unit, (index,)

    def heard(full: torch.Tensor) -> None:
        unit, grads = unit_ref(), ref()
        if unit is None:
            return
        if grads is None:
            _refuse_old_graph(unit, full)
        else:
            context = unit.context
            backward = context.backward or context.begin_backward()
            backward.gradient_arrived(unit, grads, own)

    return heard


def _refuse_old_graph(unit: Unit, full: torch.Tensor) -> None:
    """A gradient for a layout that is no more."""
    if full.grad is not None:
        full.grad = None
        raise EngineError(
            f"{unit.name}: this backward goes through a forward from before the unit was laid "
            "out anew (parameters added, removed, moved or cast); run the backward first"
        )
