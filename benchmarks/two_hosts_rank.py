"""One rank of benchmarks/two_hosts.py, started by torchrun in one of the two hosts.

All engines live in this process and take turns: for each profile of the cable, in each round, each
engine some steps. The first rank of a host sets its end of the cable and reads its counters; rank 0
writes what all found, as one JSON object, after each round.

    python two_hosts_rank.py PLAN.json      the plan is what `Plan` says, as JSON
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

import testbed
from shardwise.bench.engines import EngineSpec, parse_engine
from shardwise.bench.trainers import Setup, make_trainer
from shardwise.bench.workload import SEED, DecoderWorkload
from two_hosts_traffic import by_collectives, by_layout, on_cable, sent_across

PROBE_BYTES, PROBE_S = 2**22, 0.4


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks of a job do; plain values, for JSON."""

    engines: list[str]
    profiles: list[tuple[float, float]]  # Gbit/s, ms
    layers: int
    dim: int
    heads: int
    num_tokens: int
    vocab_size: int
    num_rounds: int
    num_steps: int
    limit_s: float
    answer: str  # the file that rank 0 writes


@dataclass(slots=True)
class Cell:
    """One engine under one profile; bytes are those of a step, out of each of the two hosts."""

    step_s: list[float] = field(default_factory=list)  # of each round, a mean over steps and ranks
    wire_bytes: list[list[float]] = field(default_factory=list)
    interface_bytes: list[list[float]] = field(default_factory=list)
    dropped: int = 0
    loss: float = 0.0
    num_steps_done: int = 0


class Rank:
    """This rank's part of the job."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.here = int(os.environ["LOCAL_WORLD_SIZE"])
        self.is_first = os.environ["LOCAL_RANK"] == "0"
        self.workload = DecoderWorkload(
            "two_hosts", plan.layers, plan.dim, plan.heads, plan.num_tokens, plan.vocab_size
        )
        self.batches = self.workload.batches(self.rank, self.world)
        self.trainers: dict[str, Any] = {}
        self.num_done: dict[str, int] = {}
        self.predicted: dict[str, Any] = {}

    def run(self) -> None:
        began, plan, answer = time.monotonic(), self.plan, Path(self.plan.answer)
        for number, (gbit_s, delay_ms) in enumerate(plan.profiles, 1):
            self.shape(testbed.Profile(gbit_s, delay_ms))
            if number == 1:
                for name in plan.engines:
                    self.prepare(name)
            reached = self.probe()
            cells = {name: Cell() for name in plan.engines}
            end_s, longest_s = plan.limit_s * number / len(plan.profiles), 0.0
            for turn in range(plan.num_rounds):
                now_s = time.monotonic() - began
                if turn and not self.agreed(now_s + longest_s < end_s):
                    break
                names = plan.engines[turn % 2 * -1 :: -1 if turn % 2 else 1]
                for name in names:  # there and back, so that none is always behind the same
                    self.turn(name, cells[name])
                longest_s = max(longest_s, time.monotonic() - began - now_s)
                if self.rank == 0:
                    self.write(answer, number - 1, reached, cells)

    def write(self, answer: Path, number: int, reached: float, cells: dict[str, Cell]) -> None:
        found = json.loads(answer.read_text()) if answer.exists() else {"profiles": []}
        found["predicted"] = self.predicted
        found["num_params"] = self.workload.num_params
        gbit_s, delay_ms = self.plan.profiles[number]
        profile = {"gbit_s": gbit_s, "delay_ms": delay_ms, "reached_gbit_s": reached}
        profile["cells"] = {name: asdict(cell) for name, cell in cells.items()}
        found["profiles"][number:] = [profile]
        answer.write_text(json.dumps(found))
        print(f"two_hosts: {gbit_s:g} Gbit/s, a round", file=sys.stderr, flush=True)

    def prepare(self, name: str) -> None:
        """Build it, take its first step, and find what a step moves."""
        spec: EngineSpec = parse_engine(name)
        model = self.workload.build()
        setup = Setup(spec, model, "fp32", 1, self.workload.unit, "fused", 3e-4)
        self.trainers[name], self.num_done[name] = make_trainer(setup), 0
        del model, setup
        gc.collect()
        self.step(name)
        if spec.kind == "shardwise":
            collectives = by_layout(self.trainers[name].model, lambda: self.step(name))
        else:
            collectives = by_collectives(lambda: self.step(name))
        mine = sent_across(self.rank, collectives, self.here)
        payload = [sum(part) for part in self.by_host(mine)]
        self.predicted[name] = {
            "by": "layout" if spec.kind == "shardwise" else "collectives",
            "payload_bytes": payload,
            "wire_bytes": [on_cable(payload[i], payload[1 - i]) for i in (0, 1)],
        }

    def step(self, name: str) -> float:
        batch = self.batches[self.num_done[name] % len(self.batches)]
        self.num_done[name] += 1
        return float(self.trainers[name].step([batch]))

    def turn(self, name: str, cell: Cell) -> None:
        """Some steps, timed and counted."""
        before, num = self.counted(), self.plan.num_steps
        dist.barrier()  # nobody steps before the counters are read
        elapsed_s, loss = _timed(lambda: self.step(name), num)
        after = self.counted()
        moved = None if before is None or after is None else after - before
        told = self.all_of((elapsed_s / num, loss, moved))
        cell.step_s.append(fmean(each[0] for each in told))
        cell.loss, cell.num_steps_done = fmean(each[1] for each in told), self.num_done[name]
        hosts = [told[0][2], told[self.here][2]]
        cell.wire_bytes.append([host.wire_bytes / num for host in hosts])
        cell.interface_bytes.append([host.interface_bytes / num for host in hosts])
        cell.dropped += sum(host.dropped for host in hosts)

    def counted(self) -> testbed.Sent | None:
        """What this host has sent, on its first rank."""
        dist.barrier()
        return testbed.sent() if self.is_first else None

    def shape(self, profile: testbed.Profile) -> None:
        dist.barrier()
        if self.is_first:
            testbed.shape(profile)
        dist.barrier()

    def probe(self) -> float:
        """Gbit/s from the first host to the second by sends of Gloo, headers not counted."""
        block, to = torch.zeros(PROBE_BYTES // 4), self.here
        if self.rank not in (0, to):
            dist.barrier()
            return 0.0
        talk: Callable[[], Any] = (
            (lambda: dist.send(block, to)) if self.rank == 0 else (lambda: dist.recv(block, 0))
        )
        talk()
        num = max(2, round(PROBE_S * 1e9 / 8 / PROBE_BYTES))
        elapsed_s, _ = _timed(talk, num)
        dist.barrier()
        return num * PROBE_BYTES * 8 / elapsed_s / 1e9

    def agreed(self, wish: bool) -> bool:
        """What rank 0 wishes."""
        return self.all_of(wish)[0]

    def all_of(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def by_host(self, mine: Any) -> list[list[Any]]:
        found = self.all_of(mine)
        return [found[: self.here], found[self.here :]]


def _timed(call: Callable[[], Any], num: int) -> tuple[float, Any]:
    began, last = time.perf_counter(), None
    for _ in range(num):
        last = call()
    return time.perf_counter() - began, last


def main() -> int:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    Rank(plan).run()
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
