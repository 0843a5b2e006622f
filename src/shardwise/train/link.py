"""What the link between hosts costs a job that gathers across it: measured, and told once.

    at the start   all ranks gather PROBE_BYTES together: bytes a second of one ring
    second step    what gathers and reductions move, by events and layouts
    third step     the seconds which that takes, beside those of the step: said, and in log.jsonl

Both are rings over all ranks of the copy, so their bytes compare as they are. A reduce-scatter
moves as much as a gather, on Gloo, which has none, twice that. What hybrid_shard would move between
hosts is an all-reduce of every gradient, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.ranks import Ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import record_events
from shardwise.events import EventLog
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
        self.bytes_per_s = bytes_per_s  # that pass through each link of a ring
        self._per_reduction = 2 if is_gloo else 1
        self._num_steps = 0
        self._gathered = self._reduced = 0  # bytes of whole units, in one step

    def over(self, model: nn.Module, step: _Step) -> tuple[tuple[dict[str, Any], str], dict | None]:
        """Takes a step; what there is to tell, behind the third one."""
        self._num_steps += 1
        if self._num_steps == 2:
            with record_events(model) as log:
                found = step()
            self._gathered, self._reduced = moved_bytes(model, log)
            return found, None
        found = step()
        if self._num_steps < 3:
            return found, None
        return found, self.cost(found[0]["step_time_s"])

    def cost(self, step_s: float) -> dict[str, Any]:
        """Of a step: bytes through the link, the seconds that they take, those of hybrid_shard."""
        num_hosts, world = len(self._hosts), sum(len(host.ranks) for host in self._hosts)
        moved = self._gathered + self._per_reduction * self._reduced
        moved = round(moved * (world - 1) / world)
        return {
            "hosts": num_hosts,
            "bytes_per_s": round(self.bytes_per_s),
            "link_bytes": moved,
            "link_s": round(moved / self.bytes_per_s, 9),
            "step_s": round(step_s, 6),
            "hybrid_bytes": round(2 * (num_hosts - 1) / num_hosts * self._reduced),
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
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    times = []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        gather(whole, part)
        whole[-1].item()  # a device is done then
        times.append(time.perf_counter() - began)
    return min(times[1:])


def moved_bytes(model: nn.Module, log: EventLog) -> tuple[int, int]:
    """Of all ranks together: what was gathered, and what was put into reductions."""
    units = {unit.name: unit for unit in units_in(model)}
    gathered = reduced = 0
    for event in log.codes("AG", "RS"):
        for grads in units[event.unit].gradients.buckets:
            layout, reduce = grads.state.layout, grads.trainable_layout()
            if layout.world == 1:
                continue
            if event.code == "AG":
                gathered += layout.chunk_numel * layout.world * layout.gather_dtype.itemsize
            elif reduce.indices:
                reduced += reduce.packed_numel * reduce.dtype.itemsize
    return gathered, reduced
