"""What is left of the speed when the optimizer's state and its step are on the host, by tokens.

    python benchmarks/offload.py                       185M; 32, 128 and 512 tokens: 12 minutes
    python benchmarks/offload.py --model 23M --tokens 16,64 --rounds 1 --json PATH

The engine and `OffloadedOptimizer` run as they are; the device bus is simulated. One core is the
device: forward and backward run on it. Another one is the host: AdamW runs there, and whatever a
chunk's step brings from the device (gradient, weight) or takes there (weight) waits for its bytes
at the bus' speed, without any core. Ways, each over the same weights and tokens:

    none        forward and backward alone, clipping too where the way that it is compared with
                clips. A device's own step is charged at `--device-gbs`, 28 bytes a parameter: no
                step runs beside it, since that would be one of a CPU
    naive       after the backward: copy, step, copy
    backward    units step beside the backward (`step_in_backward`), without clipping
    forward     units step beside the next forward, behind `clip_grad_norm_`, exactly

kept = the time of `none` / that of the way. The steady state is timed: from the begin of a step to
that of the next one, which begins with what the last one has left. `predicted` comes from a model
of the pipeline that knows the times of forward, backward, clipping and AdamW alone, how much longer
device and AdamW take beside each other (here they share the memory, as no device and host do), the
bus, and the order of units; `at_0.95` is where its curve, and the measured one, reach 0.95, in
tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.bench.workload import WORKLOADS, DecoderWorkload
from shardwise.engine.core.state import units_in
from shardwise.offload import OffloadedOptimizer
from shardwise.train.columns import Column, console_of, print_columns

WAYS = ("naive", "backward", "forward")
PLAIN = ("none", "none, clipped")
CLIPS = ("naive", "forward", "none, clipped")
STEP_BYTES = 28  # of AdamW in float32: weight, gradient and two moments read, three written
KEPT = 0.95


@dataclass
class Bus:
    """Carries one thing at a time; whoever waits for it uses no core."""

    bytes_per_s: float = math.inf
    seconds: float = 0.0

    def carry(self, num_bytes: int) -> None:
        took = num_bytes / self.bytes_per_s
        self.seconds += took
        if took:
            time.sleep(took)


@contextlib.contextmanager
def behind_a_bus(bus: Bus) -> Iterator[None]:
    """Every chunk's step brings gradients and weights over the bus, and takes weights back."""
    original = OffloadedOptimizer._step_chunk

    def step(self: Any, part: Any, chunk: Any, memory: Any, scalars: Any) -> None:
        pieces = [p for p in chunk.pieces if p.entry.parameter in part.gradients]
        weights = sum((p.stop - p.start) * p.entry.parameter.itemsize for p in pieces)
        gradients = sum(
            (p.stop - p.start) * part.gradients[p.entry.parameter].itemsize for p in pieces
        )
        bus.carry(gradients + weights)
        original(self, part, chunk, memory, scalars)
        bus.carry(weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedOptimizer, "_step_chunk", step)
        yield


# -- one way ---------------------------------------------------------------------------------------
class Run:
    """A model that is trained one way, a step at a time."""

    def __init__(self, workload: DecoderWorkload, way: str) -> None:
        self.way = way
        self.model: Any = workload.build()
        sw.shard_model(self.model)
        self.optimizer: OffloadedOptimizer | None = None
        if way not in PLAIN:
            self.optimizer = OffloadedOptimizer(
                torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True),
                state="cpu", in_background=way != "naive",
            )  # fmt: skip
            self.optimizer.reserve()
        if way == "backward":
            sw.step_in_backward(self.model, self.optimizer)

    def step(self, tokens: torch.Tensor) -> float:
        """The loss."""
        loss = self.model(tokens)
        loss.backward()
        if self.way in CLIPS:
            sw.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.optimizer is not None and self.way != "backward":
            self.optimizer.step()
        self.model.zero_grad()
        return float(loss.detach())

    def step_alone(self, tokens: torch.Tensor, num: int) -> float:
        """Seconds of the fastest of some steps of the optimizer, with nothing beside it."""
        assert self.optimizer is not None
        self.model(tokens).backward()
        took = [timed(self._step_and_wait) for _ in range(num)]
        self.model.zero_grad()
        return min(took)

    def _step_and_wait(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.flush()

    def settle(self) -> None:
        if self.optimizer is not None:
            self.optimizer.flush()


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def steady(run: Run, tokens: torch.Tensor, bus: Bus, gbs: float) -> float:
    """Seconds of a step that begins with what the one before has left."""
    bus.bytes_per_s = gbs * 1e9
    run.step(tokens)
    took = timed(lambda: run.step(tokens))
    run.settle()
    return took


# -- prediction ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pieces:
    """Seconds of the parts of a step, each alone; `adamw` for a parameter."""

    forward: float
    backward: float
    clip: float
    adamw: float
    unit_numels: tuple[int, ...]  # in the order of the forward
    device_beside: float = 1.0  # how much longer while AdamW runs beside it, and AdamW itself
    adamw_beside: float = 1.0


def predicted(way: str, pieces: Pieces, gbs: float) -> float:
    """Seconds of a step in the steady state: units compute in turn on the device, in shares by
    their parameters, and step in turn on the host.
    """
    numels, total = pieces.unit_numels, sum(pieces.unit_numels)
    if way == "naive":
        steps = sum(n * (12 / (gbs * 1e9) + pieces.adamw) for n in numels)
        return pieces.forward + pieces.backward + pieces.clip + steps
    clock = Clock(pieces, gbs)
    for _ in range(4):  # until what is left over is the same in each step
        begun = clock.now
        for i, numel in enumerate(numels):
            clock.finish_unit(i)
            clock.compute(pieces.forward * numel / total)
        for i in reversed(range(len(numels))):
            clock.compute(pieces.backward * numels[i] / total)
            if way == "backward":
                clock.hand_over(i)
        if way == "forward":
            clock.compute(pieces.clip)
            for i in range(len(numels)):
                clock.hand_over(i)
    return clock.now - begun


class Clock:
    """Device and host at work. While the host computes AdamW both go slower, as far as they share
    memory; while it waits for the bus they do not.
    """

    def __init__(self, pieces: Pieces, gbs: float) -> None:
        self.now = 0.0
        self._pieces, self._bus = pieces, 12 / (gbs * 1e9)
        self._queue: list[list[Any]] = []  # of the host: [unit, seconds on the bus, of AdamW]

    def hand_over(self, unit: int) -> None:
        numel = self._pieces.unit_numels[unit]
        self._queue.append([unit, numel * self._bus, numel * self._pieces.adamw])

    def compute(self, seconds: float) -> None:
        """The device, with the host beside it."""
        while seconds > 1e-12:
            seconds -= self._advance(seconds)

    def finish_unit(self, unit: int) -> None:
        """The device waits for the host."""
        while any(u == unit for u, _, _ in self._queue):
            self._advance(None)

    def _advance(self, device: float | None) -> float:
        """Until one of the two has done what it is at; what the device has done of it."""
        job = self._queue[0] if self._queue else None
        is_adamw = job is not None and job[1] <= 0
        beside = is_adamw and device is not None
        slow_device = self._pieces.device_beside if beside else 1.0
        slow_host = self._pieces.adamw_beside if beside else 1.0
        took = math.inf if device is None else device * slow_device
        if job is not None:
            left = job[2] * slow_host if is_adamw else job[1]
            took = min(took, left)
            job[2 if is_adamw else 1] -= took / slow_host if is_adamw else took
            if job[1] <= 1e-12 and job[2] <= 1e-12:
                self._queue.pop(0)
            elif job[1] <= 1e-12:
                job[1] = 0.0
        self.now += took
        return 0.0 if device is None else took / slow_device


def reaches(curve: list[tuple[int, float]], level: float) -> float | None:
    """Tokens at which a rising curve gets there, on a logarithmic scale; None: outside of it."""
    for (a, low), (b, high) in itertools.pairwise(curve):
        if low < level <= high:
            share = (level - low) / (high - low)
            return math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
    return None


# -- measuring -------------------------------------------------------------------------------------
def alone(runs: dict[str, Run], tokens: torch.Tensor, rounds: int) -> Pieces:
    """The parts of a step, each by itself."""
    plain, naive = runs["none"], runs["naive"]
    forwards, backwards, clips = [], [], []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        loss = plain.model(tokens)
        between = time.perf_counter()
        loss.backward()
        backwards.append(time.perf_counter() - between)
        forwards.append(between - began)
        clips.append(timed(lambda: sw.clip_grad_norm_(plain.model.parameters(), 1.0)))
        plain.model.zero_grad()
    numels = tuple(
        sum(p.sharded.numel() for p in unit.params) for unit in units_in(naive.model) if unit.params
    )
    adamw = min(runs[way].step_alone(tokens, rounds + 1) for way in ("forward", "naive"))
    device_s, adamw_s = beside(plain, runs["beside"], tokens, rounds + 1)
    alone_s = min(forwards) + min(backwards)
    return Pieces(
        min(forwards), min(backwards), min(clips), adamw / sum(numels), numels,
        max(1.0, device_s / alone_s), max(1.0, adamw_s / adamw),
    )  # fmt: skip


def beside(plain: Run, stepped: Run, tokens: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Seconds of forward and backward while another thread steps all the time, and of its steps:
    the fastest of both.
    """
    stepped.model(tokens).backward()
    stop, steps = threading.Event(), list[float]()

    def step() -> None:
        while not stop.is_set():
            steps.append(timed(stepped._step_and_wait))

    thread = threading.Thread(target=step)
    thread.start()
    try:
        took = []
        for _ in range(rounds):
            took.append(timed(lambda: plain.model(tokens).backward()))
            plain.model.zero_grad()
    finally:
        stop.set()
        thread.join()
    stepped.model.zero_grad()
    return min(took), min(steps[:-1] or steps)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    base = WORKLOADS[args.model]
    workload = replace(base, num_tokens=max(args.tokens))
    runs = {way: Run(workload, way) for way in (*PLAIN, *WAYS)}
    runs["beside"] = Run(workload, "naive")
    bus, rows = Bus(), []
    with behind_a_bus(bus):
        for num_tokens in args.tokens:
            generator = torch.Generator().manual_seed(num_tokens)
            tokens = torch.randint(base.vocab_size, (1, num_tokens + 1), generator=generator)
            bus.bytes_per_s = math.inf
            pieces = alone(runs, tokens, args.rounds)
            best: dict[tuple[str, float], float] = {}
            for _ in range(args.rounds):
                every = [(math.inf, way) for way in PLAIN]
                for gbs, way in (*every, *itertools.product(args.gbs, WAYS)):
                    took = steady(runs[way], tokens, bus, gbs)
                    best[way, gbs] = min(took, best.get((way, gbs), math.inf))
            charged = STEP_BYTES * sum(pieces.unit_numels) / (args.device_gbs * 1e9)
            for gbs, way in itertools.product(args.gbs, WAYS):
                plain = best[PLAIN[way in CLIPS], math.inf] + charged
                alone_s = pieces.forward + pieces.backward + charged
                alone_s += pieces.clip if way in CLIPS else 0.0
                rows.append({
                    "tokens": num_tokens, "bus_gbs": gbs, "way": way, "none_s": plain,
                    "step_s": best[way, gbs], "kept": plain / best[way, gbs],
                    "predicted": alone_s / predicted(way, pieces, gbs),
                    "forward_s": pieces.forward, "backward_s": pieces.backward,
                    "clip_s": pieces.clip, "device_beside": pieces.device_beside,
                    "adamw_beside": pieces.adamw_beside,
                    "adamw_s": pieces.adamw * sum(pieces.unit_numels),
                })  # fmt: skip
    check_losses(runs, tokens)
    return rows


def check_losses(runs: dict[str, Run], tokens: torch.Tensor) -> None:
    """All ways that clip have taken the same steps, so they have the same weights."""
    names = [n for n, _ in runs["naive"].model.named_parameters()]
    ours, naive = (dict(runs[way].model.named_parameters()) for way in ("forward", "naive"))
    for name in names:
        if not torch.equal(ours[name].to_local(), naive[name].to_local()):
            raise SystemExit(
                f"{name}: other weights beside the next forward than one after another"
            )


def crossings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for gbs, way in sorted({(r["bus_gbs"], r["way"]) for r in rows}):
        own = [r for r in rows if (r["bus_gbs"], r["way"]) == (gbs, way)]
        at = {
            key: reaches([(r["tokens"], r[key]) for r in own], KEPT)
            for key in ("kept", "predicted")
        }
        found.append(
            {"bus_gbs": gbs, "way": way, "measured": at["kept"], "predicted": at["predicted"]}
        )
    return found


def show(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    cells = [(r["tokens"], r["bus_gbs"]) for r in rows if r["way"] == WAYS[0]]
    of_way = {way: [r for r in rows if r["way"] == way] for way in WAYS}
    columns = [
        Column("tokens", [f"{tokens}" for tokens, _ in cells]),
        Column("bus, GB/s", [f"{gbs:g}" for _, gbs in cells]),
        Column("none, s", [f"{r['none_s']:.2f}" for r in of_way["backward"]]),
        Column("clipped, s", [f"{r['none_s']:.2f}" for r in of_way["naive"]]),
    ]
    for way, own in of_way.items():
        texts = [f"{r['kept']:.2f} ({r['predicted']:.2f})" for r in own]
        columns.append(Column(f"{way}: kept (predicted)", texts))
    print_columns(console_of(sys.stdout), "Throughput kept, AdamW on the host", columns)
    for row in found:
        texts = [
            "outside" if row[key] is None else f"{row[key]:.0f} tokens"
            for key in ("measured", "predicted")
        ]
        print(
            f"{KEPT} kept, {row['way']} at {row['bus_gbs']:g} GB/s: "
            f"{texts[0]}, predicted {texts[1]}"
        )


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="185M")
    parser.add_argument("--tokens", type=numbers(int), default=[32, 128, 512], help="with commas")
    parser.add_argument("--gbs", type=numbers(float), default=[8.0, 16.0, 32.0], help="of the bus")
    parser.add_argument("--device-gbs", type=float, default=3350.0, help="memory of the device")
    parser.add_argument("--rounds", type=int, default=2, help="the fastest is taken")
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rows = measure(args)
    dist.destroy_process_group()
    found = crossings(rows)
    show(rows, found)
    result = {
        "benchmark": "offload", "simulated_bus": True, **describe(), "model": args.model,
        "device_gbs": args.device_gbs, "rounds": args.rounds, "rows": rows, "at_0.95": found,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
