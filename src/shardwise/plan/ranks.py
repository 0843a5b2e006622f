"""The time of a step of CPU ranks, from what `shardwise doctor --save` measured on their machine.

    forward, backward   every operator of the model's own step on fake tensors (recomputed ones and
                        those of the loss too), each by the table of its kind
    gather, reduce      by the table of the transport, as many as the schedule has
    step                the norm of the gradients and their scaling, then the optimizer, which
                        reads and writes so many words an element

Nothing overlaps: the schedule's lanes are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout import Lifetime
from shardwise.layout.unit import Collective, Moment
from shardwise.plan import trace as marks
from shardwise.plan.measured import Rates
from shardwise.plan.model import PlannedModel, PlannedUnit
from shardwise.plan.simulate import StepTime, UnitTime, simulate
from shardwise.plan.trace import Trace

_ADAMW_WORDS = 7  # parameter, two moments: read and written; gradient: read
_TRANSPORT = {"auto": "shared_memory"}  # what ranks of one host take


@dataclass(frozen=True, slots=True)
class Stepping:
    """How a step goes: `clips` gradients by their norm."""

    micro_batches: int = 1
    clips: bool = True


def why_unknown(plan: PlannedModel, rates: Rates) -> str | None:
    """Why these rates say nothing of this plan."""
    ranks = plan.world * plan.replicas
    if ranks != rates.ranks:
        return (
            f"no time: the hardware file has that of {rates.ranks} ranks side by side; "
            f"shardwise doctor --save FILE --ranks {ranks} measures {ranks} on this machine"
        )
    for unit in plan.units:
        kinds = {each.kind for each in unit.collectives}
        if not rates.knows(_transport(unit), kinds):
            return f"no time: the hardware file has no collectives of {_transport(unit)}"
    return None


def ranks_step_time(plan: PlannedModel, trace: Trace, rates: Rates, how: Stepping) -> StepTime:
    """One optimizer step of each rank; `why_unknown` first."""
    forward, backward = _computed(plan, trace, rates)
    units = [
        _unit_time(unit, forward[number], backward[number], rates)
        for number, unit in enumerate(plan.units)
    ]
    defers = plan.units[0].strategy.defers_reduction
    return simulate(
        units,
        step_s=_step_s(plan, rates, how) + (_added_s(plan, rates, how) if defers else 0.0),
        micro_batches=how.micro_batches,
        reduces_each=not defers,
        overlaps=False,
    )


def _computed(plan: PlannedModel, trace: Trace, rates: Rates) -> tuple[list[float], list[float]]:
    """Seconds of each unit in one micro-batch; what is outside of all is the root's."""
    root = len(plan.units) - 1
    forward, backward = [0.0] * len(plan.units), [0.0] * len(plan.units)
    inside: list[int] = []
    is_over, at = False, root
    for mark in trace.marks:
        seconds = rates.all_seconds(mark.work)
        if is_over:
            backward[at] += seconds
        else:
            forward[inside[-1] if inside else root] += seconds
        if mark.what == marks.CALLED:
            inside.append(mark.unit)
        elif mark.what == marks.LEFT:
            inside.pop()
        elif mark.what == marks.FORWARD_OVER:
            is_over = True
        elif mark.what == marks.REACHED:
            at = mark.unit
    return forward, backward


def _unit_time(unit: PlannedUnit, forward: float, backward: float, rates: Rates) -> UnitTime:
    times = dict.fromkeys(Moment, 0.0)
    for each in unit.collectives:
        times[each.moment] += _collective_s(unit, each, rates)
    cast = _cast_s(unit, rates)
    times[Moment.FORWARD] += cast
    if times[Moment.BACKWARD]:
        times[Moment.BACKWARD] += cast
    return UnitTime(
        unit.name,
        forward,
        backward,
        gather=times[Moment.FORWARD],
        gather_again=times[Moment.BACKWARD],
        reduce=times[Moment.POST_BACKWARD],
        gathers_once=unit.strategy.lifetime is Lifetime.CLEAN,
        is_root=unit.is_root,
    )


def _collective_s(unit: PlannedUnit, each: Collective, rates: Rates) -> float:
    bucket = unit.layout.buckets[0]
    ranks = each.ranks or (bucket.world if each.axis == "shard" else bucket.replicas)
    return rates.collective_s(_transport(unit), each.kind, each.received_bytes(ranks))


def _cast_s(unit: PlannedUnit, rates: Rates) -> float:
    """Of the own part, before it is gathered in another dtype."""
    sizes = (
        b.chunk_numel * (b.dtype.itemsize + b.gather_dtype.itemsize)
        for b in unit.layout.buckets
        if b.needs_cast
    )
    return sum(rates.operator_s("elementwise", size) for size in sizes)


def _step_s(plan: PlannedModel, rates: Rates, how: Stepping) -> float:
    """Behind the last backward."""
    trained = sum(unit.layout.grad_bytes for unit in plan.units)
    if not trained:
        return 0.0
    states = plan.units[0].num_states
    words = 3 + 2 * states
    seconds = rates.operator_s("adamw", trained) * words / _ADAMW_WORDS
    if how.clips:  # the norm reads, scaling reads and writes
        seconds += rates.operator_s("elementwise", 3 * trained)
    return seconds


def _added_s(plan: PlannedModel, rates: Rates, how: Stepping) -> float:
    """Whole gradients of micro-batches that wait for the last one are summed."""
    total = 0.0
    for unit in plan.units:
        for reduce in unit.layout.reduces:
            size = sum(p.numel for p in reduce.params) * reduce.dtype.itemsize
            total += rates.operator_s("elementwise", 3 * size) if size else 0.0
    return (how.micro_batches - 1) * total


def _transport(unit: PlannedUnit) -> str:
    return _TRANSPORT.get(unit.transport, unit.transport)
