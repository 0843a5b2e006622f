"""From a planned model and what a device can do to the time of its step.

Matrix products go at a share of the vendor's peak: `EAGER`, `COMPILED`, fitted on published runs
(`published`), for all devices alike where there is no run of one. An optimizer's step reads and
writes its state once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout import Lifetime
from shardwise.layout.unit import Collective, Moment
from shardwise.plan.hardware import Device
from shardwise.plan.links import Links
from shardwise.plan.model import PlannedModel, PlannedUnit
from shardwise.plan.simulate import StepTime, UnitTime, simulate

# Shares of the peak that torchtitan's Llama 3.1 8B reached on 8 x H100, and with float8 on 32 x
# H200: `benchmarks/plan_published.py` fits them, and a test holds these to what it fits.
EAGER, COMPILED, FLOAT8 = 0.352, 0.407, 0.334


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a device and its links; `overlaps`: communication runs beside computation."""

    device: Device
    links: Links
    dtype: str = "bfloat16"
    efficiency: float = EAGER
    overlaps: bool = True

    def flops_s(self, flops: float) -> float:
        return flops / (self.device.flops(self.dtype) * self.efficiency)

    def bytes_s(self, num_bytes: float) -> float:
        return num_bytes / self.device.bandwidth


@dataclass(frozen=True, slots=True)
class Work:
    """Floating point operations of the forward of one micro-batch on one rank, by unit in the order
    of the plan, and outside of all units; `recomputes`: each unit's forward runs again.
    """

    forward: Sequence[float]
    outside: float = 0.0
    recomputes: float = 0.0  # the share of a forward that runs again before its backward
    micro_batches: int = 1


def links_of(device: Device, link: tuple[float, float] | None, per_host: int) -> Links:
    """The device's own, or what `--link` says; hosts of `per_host` devices."""
    inside, latency = link or (device.link, 15e-6)
    return Links(inside, device.network, per_host, latency)


def step_time(plan: PlannedModel, work: Work, speed: Speed) -> StepTime:
    """See `simulate`."""
    pairs = zip(plan.units, work.forward, strict=True)
    units = [_unit_time(plan, unit, flops, work, speed) for unit, flops in pairs]
    if work.outside:
        seconds = speed.flops_s(work.outside)
        units.append(UnitTime("outside", seconds, 2 * seconds))
    state = sum(u.state_bytes + u.layout.grad_bytes + u.layout.shard_bytes for u in plan.units)
    return simulate(
        units,
        step_s=speed.bytes_s(2 * state),  # read and written
        micro_batches=work.micro_batches,
        reduces_each=not plan.units[0].strategy.defers_reduction,
        overlaps=speed.overlaps,
    )


def _unit_time(
    plan: PlannedModel, unit: PlannedUnit, flops: float, work: Work, speed: Speed
) -> UnitTime:
    forward = speed.flops_s(flops)
    times = dict.fromkeys(Moment, 0.0)
    for each in unit.collectives:
        times[each.moment] += _seconds(plan, unit, each, speed.links)
    return UnitTime(
        unit.name,
        forward,
        (2 + work.recomputes) * forward,
        gather=times[Moment.FORWARD],
        gather_again=times[Moment.BACKWARD],
        reduce=times[Moment.POST_BACKWARD],
        gathers_once=unit.strategy.lifetime is Lifetime.CLEAN,
        is_root=unit.is_root,
    )


def _seconds(plan: PlannedModel, unit: PlannedUnit, each: Collective, links: Links) -> float:
    """Neighbours share a host: those of the shard axis before replicas."""
    bucket = unit.layout.buckets[0]
    axis = bucket.world if each.axis == "shard" else bucket.replicas
    received = each.received_bytes(axis)
    everyone = plan.world * plan.replicas
    crosses = everyone > links.per_host and (
        each.axis == "replicate" or bucket.world > links.per_host
    )
    if crosses and each.axis == "replicate" and bucket.world > 1:
        return links.by_own_port(received)
    return links.seconds(received, each.ranks or axis, crosses=crosses)
