"""What is gathered ahead of its use, and how much may be gathered at a time.

    forward    units follow each other as in the forward before: while one computes, the gather of
               the next is on its way. A pass that leaves the known order goes on without
               prefetching, and its own order is what the next pass expects
    backward   the reverse of the order in which this pass' forwards ended

    known  R L0 L1 L2        gathers   R, L0 | F R: - | F L0: L1 | F L1: L2 | F L2: -

One unit ahead, so that two are gathered at a time beside the root's; with a limit in bytes as many
as fit under it. Where gathering does not run beside computing there is nothing to gain and memory
to lose: shared memory copies at once, and with Gloo the ranks' processors are what moves the bytes.
There prefetching is off until somebody asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch.nn as nn

from shardwise.engine.core.state import sharded_modules, sharded_units, unit_of
from shardwise.layout import Lifetime

if TYPE_CHECKING:
    from shardwise.engine.core.context import Context
    from shardwise.engine.core.unit import Unit


class Prefetch:
    """Listens; see the module docstring."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Unit]] = []  # the order of the last forward
        self._running: list[weakref.ref[Unit]] = []  # of this one
        self._follows = False
        self._ahead: dict[Unit, None] = {}  # gathered ahead in this forward, not used yet
        # Forwards whose backward is to come, as they ended.
        self._ended: list[weakref.ref[Unit]] = []

    def before_forward(self, _context: Context) -> None:
        self._running = []
        self._follows = True

    def computing(self, unit: Unit) -> None:
        self._ahead.pop(unit, None)
        at = len(self._running)
        self._running.append(unit.ref)
        self._follows = self._follows and at < len(self._known) and self._known[at]() is unit
        if unit.forward_prefetch:
            for ref in unit.forward_prefetch:
                if (named := ref()) is not None:
                    named.unshard()
        elif self._follows and unit.overlaps:
            self._ahead |= dict.fromkeys(_issue(unit, self._after(at), unit.context))

    def after_forward(self, _context: Context) -> None:
        """What was gathered in vain is released, or complete: shards may be written next."""
        self._known = self._running
        for unit in self._ahead:
            if unit.copy.is_there and not unit.copy.holds:
                unit.reshard()
            elif unit.copy.is_there:
                unit.copy.wait()
        self._ahead.clear()

    def computed(self, unit: Unit) -> None:
        if unit.overlaps:
            self._ended.append(unit.ref)

    def computing_backward(self, unit: Unit) -> None:
        if unit.backward_prefetch:
            for ref in unit.backward_prefetch:
                if (named := ref()) is not None and not named.keeps_between_steps:
                    named.unshard()
        elif unit.ref in self._ended:
            while self._ended.pop() is not unit.ref:
                pass
            before = (u for ref in reversed(self._ended) if (u := ref()) is not None)
            _issue(unit, (u for u in before if not u.keeps_between_steps), unit.context)

    def after_backward(self, context: Context) -> None:
        if not context.order:  # no other is to come
            self.failed(context)

    def failed(self, _context: Context) -> None:
        self._ended.clear()
        self._ahead.clear()

    def _after(self, at: int) -> Iterator[Unit]:
        for ref in self._known[at + 1 :]:
            unit = ref()
            if unit is None:
                return
            yield unit


def _issue(unit: Unit, candidates: Iterable[Unit], context: Context) -> list[Unit]:
    """Issue the gathers of what comes next, one unit or as many as fit under the limit."""
    limit, issued = unit.gather_limit, []
    held = 0 if limit is None else sum(u.full_bytes for u in context.units if u.copy.is_there)
    for ahead in candidates:
        if ahead.copy.needs_gather:
            more = 0 if ahead.copy.is_there else ahead.full_bytes
            if limit is not None and held + more > limit:
                break
            ahead.unshard()
            issued.append(ahead)
            held += more
        if limit is None:
            break
    return issued


def set_prefetch(
    model: nn.Module, enabled: bool | None = None, *, gather_limit: int | None = None
) -> None:
    """Whether units are gathered ahead of their use, and how many bytes may be gathered at a time.

    Args:
        model: a model with sharded modules; goes for all of them.
        enabled: None for the default: on accelerators yes, on CPU no.
        gather_limit: bytes of gathered parameters that prefetching may reach; None: one unit
            ahead. What is needed now is always gathered, so the limit must hold the largest unit
            together with those around it.

    Raises:
        ValueError: no module is sharded, the limit is too small, or a strategy keeps whole
            parameters, for which no limit can be held.
    """
    units = sharded_units(model)
    if gather_limit is not None:
        _check_limit(model, units, gather_limit)
    for unit in units:
        unit.set_prefetch(enabled, gather_limit)


def _check_limit(model: nn.Module, units: list[Unit], limit: int) -> None:
    for unit in units:
        if unit.strategy.lifetime is not Lifetime.USE:
            raise ValueError(
                f"gather_limit={limit}: the unit {unit.name!r} keeps its gathered parameters "
                f"({unit.strategy.name}), so no limit can be held; use full_shard or hybrid_shard"
            )
    around: list[tuple[str, Unit]] = []
    for name, module, _ in sharded_modules(model):
        unit = unit_of(cast(nn.Module, module))
        around = [(n, u) for n, u in around if n == "" or name.startswith(f"{n}.")]
        if all(u is not unit for _, u in around):
            around.append((name, unit))
        need = sum(u.full_bytes for _, u in around)
        if need > limit:
            raise ValueError(
                f"gather_limit={limit}: {name or 'the root'!r} needs {need} bytes gathered while "
                f"it runs ({', '.join(n or '(root)' for n, _ in around)}); raise the limit, or "
                "make smaller units"
            )
