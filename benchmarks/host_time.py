"""Host time per unit and step of the engine and of its guards, without any communication.

    python benchmarks/host_time.py               48 units of 4 and of 12 parameters, fp32 and bf16
    python benchmarks/host_time.py --rounds 20 --json PATH

One process with a fake process group of 8 (collectives return at once), tiny dims, so that nothing
but Python and dispatch is left. Printed per unit and step: the plain module, shardwise, torch's
FSDP2, the ratio (ours - plain) / (FSDP2 - plain), and in float32 the same ratio for the least that
moves the same bytes in Python (`bare_engine.py`). All take turns, a step each: what disturbs the
machine disturbs all of them. The figures are medians of processor time.

The guards are part of shardwise and cannot be turned off; their share is below the noise of a step.
So each is timed by itself, in the state in which a step finds it, times how often a step calls it
(`time_guards`). The order check runs between two processes of its own over a real TCPStore.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from bare_engine import Bare
from shardwise._torch_compat import set_versions, storage_uses
from shardwise.bench.machine import describe
from shardwise.comm.board import Board
from shardwise.comm.order import OrderCheck
from shardwise.comm.transport import Position
from shardwise.engine.core.state import unit_of
from shardwise.engine.guards.ledger import check_units
from shardwise.engine.guards.views import Views

NUM_UNITS = 48
WORLD = 8


class Layer(nn.Module):
    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8, 8) for _ in range(num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = x * w
        return x


def build(num_params: int) -> nn.Sequential:
    return nn.Sequential(*(Layer(num_params) for _ in range(NUM_UNITS)))


def sharded(shard: Callable[..., Any], policy: Any, num_params: int, **options: Any) -> Any:
    model, mesh = build(num_params), init_device_mesh("cpu", (WORLD,))
    for layer in model:
        shard(layer, mesh=mesh, mp_policy=policy, **options)
    return shard(model, mesh=mesh, mp_policy=policy, **options)


def round_us(model: nn.Module, num_steps: int) -> float:
    """Microseconds per unit and step."""
    x = torch.ones(8, 8, requires_grad=True)
    began = time.process_time()
    for _ in range(num_steps):
        model(x).sum().backward()
        for p in model.parameters():
            p.grad = None
    return (time.process_time() - began) / num_steps / NUM_UNITS * 1e6


def measure(num_params: int, precision: str, num_rounds: int, order_us: float) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mixed = precision == "bf16"
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    plain: nn.Module = build(num_params)
    ours = sharded(sw.fully_shard, sw.MixedPrecisionPolicy(**dtypes), num_params, transport="c10d")
    models = {
        "plain": plain.to(torch.bfloat16) if mixed else plain,
        "ours": ours,
        "fsdp2": sharded(torch_fully_shard, TorchPolicy(**dtypes), num_params),
    }
    if not mixed:
        models["bare"] = build(num_params)
        for layer in models["bare"].children():
            Bare(layer, layer.weights)
    for model in models.values():
        round_us(model, 2)
    rounds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(num_rounds):
        for name, model in models.items():
            rounds[name].append(round_us(model, 1))
    found = {name: median(values) for name, values in rounds.items()}
    guards = time_guards(ours)
    guards["order of collectives, 3 notes and the phases' store"] = order_us

    def ratio(name: str) -> float:
        return round((found[name] - found["plain"]) / (found["fsdp2"] - found["plain"]), 3)

    return {
        "num_params": num_params,
        "precision": precision,
        **{f"{name}_us": round(value, 1) for name, value in found.items()},
        "ratio": ratio("ours"),
        **({} if mixed else {"bare_ratio": ratio("bare")}),
        "guards_us": round(sum(guards.values()), 1),
        "guards": {name: round(value, 2) for name, value in guards.items()},
    }


# -- guards ----------------------------------------------------------------------------------------
def call_us(call: Callable[[], Any], num_calls: int = 500) -> float:
    """Microseconds of processor time of one call, the median of 5 tries."""
    tries = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(num_calls):
            call()
        tries.append((time.process_time() - began) / num_calls * 1e6)
    return median(tries)


def time_guards(model: Any) -> dict[str, float]:
    """Microseconds per unit and step of what only guards against silent errors."""
    unit = unit_of(model[0])
    (grads,) = unit.gradients.buckets
    state, tally = grads.state, grads.tally
    found = {"modules hold what the engine knows, 1x": call_us(unit.is_registered)}
    unit.unshard()
    unit.copy.wait()
    found["gathered copies were not written, 2x"] = 2 * call_us(unit._check_unwritten)
    views = Views()
    found["views that user code keeps, 1 look and 6 counts"] = call_us(
        lambda: views.releasing(unit)
    ) + 6 * call_us(lambda: storage_uses(state.storage))
    versions = state._versions
    found["version counters of released memory, 4x"] = 4 * call_us(
        lambda: set_versions(state._fulls, versions)
    )
    unit.reshard()

    def count() -> None:
        for i in range(len(state.params)):
            tally.told |= 1 << i
            tally.num_told += 1
            tally.waiting |= 1 << i
            tally.num_taken += 1
        tally.waiting = 0
        tally.issued = tally.delivered = 1

    def check() -> None:
        count()
        check_units((unit,), ())

    found["ledger, all counts and 1 check"] = call_us(check)
    return found


def order_check_us(num_steps: int = 100) -> float:
    """Of one rank, per unit and step: a forward with a gather a unit, a backward with a gather and
    a reduction, both ended by a look at the neighbour. The neighbour is another process, which also
    serves the store, as rank 0's process or torchrun's agent does.
    """
    context = multiprocessing.get_context("spawn")
    ports: Any = context.Queue()
    neighbour = context.Process(target=_serve_and_follow, args=(ports, num_steps), daemon=True)
    neighbour.start()
    store = dist.TCPStore("127.0.0.1", ports.get(timeout=60), is_master=False)
    check = OrderCheck(Board(store), (0, 1), 1, "bench")
    _steps(check, 3)  # the first step of a kind asks before every collective
    began = time.process_time()
    _steps(check, num_steps)
    took = time.process_time() - began
    neighbour.join()
    return took / num_steps / NUM_UNITS * 1e6


def _serve_and_follow(ports: Any, num_steps: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ports.put(store.port)
    check = OrderCheck(Board(store), (0, 1), 0, "bench")
    _steps(check, 3)
    _steps(check, num_steps)
    time.sleep(0.5)  # the last look of the other rank


def _steps(check: OrderCheck, num: int) -> None:
    for step in range(num):
        for phase, kinds in (("forward", ("gather",)), ("backward", ("gather", "reduce"))):
            position = Position(step, phase, "")
            check.begin_phase(position)
            for i in range(NUM_UNITS):
                for kind in kinds:
                    check.note(kind, f"{i}[0]", i)
            check.end_phase(position)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--params", default="4,12", help="parameters per unit")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    order_us = order_check_us()
    rows = []
    began, load = time.time(), os.getloadavg()[0]
    print(
        " params dtype    plain     ours    fsdp2   guards  ratio   bare   (us per unit and step)"
    )
    for num_params in map(int, args.params.split(",")):
        for precision in args.precision.split(","):
            row = measure(num_params, precision, args.rounds, order_us)
            rows.append(row)
            print(
                f"{num_params:>6} {precision:>5} {row['plain_us']:>8} {row['ours_us']:>8} "
                f"{row['fsdp2_us']:>8} {row['guards_us']:>8} {row['ratio']:>6} "
                f"{row.get('bare_ratio', ''):>6}"
            )
    for name, value in rows[0]["guards"].items():
        print(f"  guard, {rows[0]['num_params']} parameters: {value:>6} us  {name}")
    facts = {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "rounds": args.rounds}
    result = {"benchmark": "host_time", **describe(), **facts, "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(f"load {facts['load']}, {time.time() - began:.0f} s")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
