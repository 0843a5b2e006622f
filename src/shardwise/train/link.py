"""What the link between hosts costs a job that gathers across it: measured, and told once.

    at the start   all ranks gather PROBE_BYTES together: bytes a second out of one host
    second step    what gathers and reductions move out of a host, by events and layouts
    third step     the seconds which that takes, beside those of the step: said, and in log.jsonl

A gather is a ring, of which one neighbour of each host is on another; a reduce-scatter moves as
much, on Gloo, which has none, twice that. In a wire format it is an all-to-all: each rank of a host
sends to all ranks of the others, unless hosts add up inside first. What hybrid_shard would move
between hosts is an all-reduce of every gradient.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise._torch_compat import all_gather_call
from shardwise.checkpoint.ranks import Ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import record_events
from shardwise.events import EventLog
from shardwise.layout import Collective, Moment
from shardwise.layout.unit import gather_of, reduce_of
from shardwise.train.config import HYBRID, Config, resolved_strategy
from shardwise.train.hosts import Host, crosses_hosts
from shardwise.units import counted, text_of_bytes

PROBE_BYTES = 2**23  # 70 ms at 1 Gbit/s
SLOW_SHARE = 0.25  # of a step, on the link, from which on it is worth a word

_Step = Callable[[], tuple[dict[str, Any], str]]
_log = logging.getLogger(__name__)


class Link:
    """Between the hosts of a job. Every rank has one, until it has told."""

    def __init__(
        self, config: Config, hosts: Sequence[Host], bytes_per_s: float, is_gloo: bool
    ) -> None:
        self._config, self._hosts = config, hosts
        self.bytes_per_s = bytes_per_s  # out of one host
        self._is_gloo = is_gloo
        self._num_steps = 0
        self._bytes = 0.0, 0.0  # out of a host in one step: as it is, under hybrid_shard

    def over(self, model: nn.Module, step: _Step) -> tuple[tuple[dict[str, Any], str], dict | None]:
        """Takes a step; what there is to tell, behind the third one."""
        self._num_steps += 1
        if self._num_steps == 2:
            with record_events(model) as log:
                found = step()
            ranks = sum(len(host.ranks) for host in self._hosts)
            self._bytes = moved_bytes(model, log, ranks, len(self._hosts), self._is_gloo)
            return found, None
        found = step()
        if self._num_steps < 3:
            return found, None
        return found, self.cost(found[0]["step_time_s"])

    def cost(self, step_s: float) -> dict[str, Any]:
        """Of a step: bytes through the link, the seconds that they take, those of hybrid_shard."""
        moved, hybrid = map(round, self._bytes)
        return {
            "hosts": len(self._hosts),
            "bytes_per_s": round(self.bytes_per_s),
            "link_bytes": moved,
            "link_s": round(moved / self.bytes_per_s, 9),
            "step_s": round(step_s, 6),
            "hybrid_bytes": hybrid,
        }

    def tell(self, cost: dict[str, Any]) -> None:
        """A warning where a step waits for the link; on one rank."""
        if (text := slow_text(cost, resolved_strategy(self._config))) is not None:
            _log.warning("%s", text)


def slow_text(cost: dict[str, Any], strategy: str) -> str | None:
    """The warning, with what was measured; None where the link takes little of a step."""
    if cost["link_s"] < SLOW_SHARE * cost["step_s"]:
        return None
    hosts = cost["hosts"]
    text = (
        f"{strategy} between {counted(hosts, 'host')}: {text_of_bytes(cost['link_bytes'])} a step "
        f"through a link of {text_of_bytes(cost['bytes_per_s'])}/s (measured) are "
        f"{cost['link_s']:.2f} s, of a step of {cost['step_s']:.2f} s"
    )
    if cost["hybrid_bytes"] >= cost["link_bytes"]:
        return text
    return (
        f"{text}; hybrid_shard with mesh.replicate = {hosts} would move "
        f"{text_of_bytes(cost['hybrid_bytes'])}, and hold {hosts} times as much of the model on "
        "each rank"
    )


def find_link(
    config: Config, hosts: Sequence[Host], ranks: Ranks, device: torch.device
) -> Link | None:
    """Measures; None where no gather goes between hosts, or a part of the ranks gathers (a
    copy of the model on several hosts was asked for). A collective."""
    if not crosses_hosts(config, hosts) or resolved_strategy(config) in HYBRID:
        return None
    if config.run.reproducible == "any_world":
        return None  # sums go another way
    seconds = ranks.gather_floats([_probe_s(ranks.world_size, device)])
    share = (ranks.world_size - 1) / ranks.world_size
    is_gloo = device.type == "cpu"
    return Link(config, hosts, PROBE_BYTES * share / float(seconds.max()), is_gloo)


def _probe_s(world: int, device: torch.device) -> float:
    """Of the faster of two gathers; connections are made by one before."""
    part = torch.zeros(PROBE_BYTES // world, dtype=torch.uint8, device=device)
    whole = torch.empty(part.numel() * world, dtype=torch.uint8, device=device)
    gather = all_gather_call()
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        gather(whole, part)
        whole[-1].item()  # a device is done then
        times.append(time.perf_counter() - began)
    return min(times[1:])


def moved_bytes(
    model: nn.Module, log: EventLog, ranks: int, hosts: int, is_gloo: bool
) -> tuple[float, float]:
    """Out of one host: what the collectives of a log send, and what hybrid_shard would."""
    units = {unit.name: unit for unit in units_in(model)}
    moved = hybrid = 0.0
    for event in log.codes("AG", "RS"):
        for grads in units[event.unit].gradients.buckets:
            layout, reduce = grads.state.layout, grads.trainable_layout()
            wire = layout.wire.shard
            if layout.world == 1:
                continue
            if event.code == "AG":
                found, twice = gather_of(layout, Moment.FORWARD), False
            elif reduce.indices:
                found = reduce_of(reduce)
                twice = is_gloo and not wire.reduce.is_lossy and not wire.host_ranks
                whole = wire.reduce.num_bytes(reduce.packed_numel, reduce.dtype.itemsize)
                hybrid += 2 * (hosts - 1) / hosts * whole
            else:
                continue
            is_direct = event.code == "RS" and wire.reduce.is_lossy
            moved += sum(out_of_host(c, ranks, hosts, is_direct) for c in found) * (1 + twice)
    return moved, hybrid


def out_of_host(collective: Collective, ranks: int, hosts: int, is_direct: bool) -> float:
    """Bytes that one host sends to others; `is_direct`: each rank to every other one."""
    here = ranks / hosts
    if collective.is_inside:
        return 0.0
    if collective.ranks:  # one rank of each host
        return here * collective.received_bytes(collective.ranks)
    if is_direct:
        return here * (ranks - here) / ranks * collective.size_bytes
    return collective.received_bytes(ranks)
