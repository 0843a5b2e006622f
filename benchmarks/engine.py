"""Step time and whole-job peak memory of shardwise beside torch FSDP2, DDP and the floor.

    python benchmarks/engine.py            50M and 185M, fp32 and bf16, 2 ranks: about 20 minutes
    python benchmarks/engine.py --quick    a tiny model, for a look at whether it works
    python benchmarks/engine.py --workload 50M --precision fp32 --engines shardwise,fsdp2,floor

Method (benchmarks/README.md says why): one run, one process group per engine, engines take turns
round by round, only one computes at a time; medians over all timed steps; memory in a pass of its
own. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

import machine
from memory import PssSampler
from rank_group import EngineFailed, RankGroup
from rank_main import Job
from results import Comparison, Row, show
from trainers import OPTIMIZERS, EngineSpec
from workloads import WORKLOADS, Precision, Workload

ENGINES = "shardwise:shared_memory,shardwise:c10d,fsdp2,ddp,floor"
NUM_WARMUP = 2
NUM_TOKENS_SLOW_BF16 = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    num_ranks: int
    num_rounds: int
    num_steps: int
    optimizer: str
    lr: float
    with_memory: bool
    processes: str  # "keep" | "fresh"


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    facts = machine.describe()
    specs = [EngineSpec(name) for name in args.engines.split(",")]
    names = ["tiny"] if args.quick else args.workload.split(",")
    comparisons = []
    for workload in [WORKLOADS[name] for name in names]:
        plan = _plan(args, workload, len(specs))
        for precision in args.precision.split(","):
            sized = replace(workload, num_tokens=_tokens(args, workload, precision, console))
            comparisons.append(compare(specs, sized, precision, plan, console))
            console.print(comparisons[-1].table())
    facts["adamw"] = args.optimizer
    result = {"benchmark": "engine", **facts, "comparisons": [c.as_json() for c in comparisons]}
    show(Console(width=None if sys.stdout.isatty() else 140), comparisons, facts)
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)
    return 0 if all(c.is_valid(row) for c in comparisons for row in c.rows) else 1


def compare(
    specs: list[EngineSpec],
    workload: Workload,
    precision: Precision,
    plan: Plan,
    console: Console,
) -> Comparison:
    """All engines on one workload: timed rounds first, then memory."""
    rows = [Row(spec) for spec in specs]
    jobs = {
        spec: Job(
            engine=spec.name,
            workload=workload,
            precision=precision,
            num_ranks=plan.num_ranks,
            optimizer=plan.optimizer,
            lr=plan.lr,
            environment=spec.environment,
        )
        for spec in specs
    }
    measure = _kept_groups if plan.processes == "keep" else _fresh_groups
    measure(rows, jobs, plan, console)
    if plan.with_memory:
        for row in rows:
            if row.error is None:
                num_steps = 2 if plan.processes == "fresh" else 3
                measure_row = partial(_measure_memory, row, jobs[row.engine], num_steps)
                _guarded(row, console, measure_row)
    return Comparison(
        workload.name,
        precision,
        plan.num_ranks,
        workload.num_tokens,
        workload.num_params,
        rows,
    )


def _kept_groups(
    rows: list[Row], jobs: dict[EngineSpec, Job], plan: Plan, console: Console
) -> None:
    """All groups stay alive and take turns."""
    groups: dict[EngineSpec, RankGroup] = {}
    try:
        for row in rows:

            def start(row: Row = row) -> None:
                groups[row.engine] = group = RankGroup(jobs[row.engine])
                group.wait_ready()
                group.run(NUM_WARMUP)

            _guarded(row, console, start)
        for round_ in range(plan.num_rounds):
            for row in rows:

                def measure(row: Row = row, round_: int = round_) -> None:
                    num_done = NUM_WARMUP + (round_ + 1) * plan.num_steps
                    row.add_round(groups[row.engine].run(plan.num_steps), num_done)

                _guarded(row, console, measure)
            _report(console, round_, rows)
    finally:
        for group in groups.values():
            group.close()


def _fresh_groups(
    rows: list[Row], jobs: dict[EngineSpec, Job], plan: Plan, console: Console
) -> None:
    """A new group for each engine and round, where all of them do not fit into memory."""
    for round_ in range(plan.num_rounds):
        for row in rows:

            def measure(row: Row = row) -> None:
                with RankGroup(jobs[row.engine]) as group:
                    group.wait_ready()
                    group.run(1)
                    row.add_round(group.run(plan.num_steps), 1 + plan.num_steps)

            _guarded(row, console, measure)
        _report(console, round_, rows)


def _measure_memory(row: Row, job: Job, num_steps: int) -> None:
    """Peak from the first step on, in a group that is alone on the machine."""
    with RankGroup(job) as group:
        group.wait_ready()
        with PssSampler(group.pids) as sampler:
            group.run(num_steps)
        row.memory = sampler.peak


def _guarded(row: Row, console: Console, measure: Callable[[], None]) -> None:
    """An engine that fails becomes a row that says so; the others go on."""
    if row.error is not None:
        return
    try:
        measure()
    except EngineFailed as error:
        row.error = str(error)
        console.print(f"[red]{row.engine.name} failed[/red]\n{error}", markup=True)


def _report(console: Console, round_: int, rows: list[Row]) -> None:
    parts = [f"{r.engine.name} {min(r.rounds[-1]) * 1e3:.0f}" for r in rows if r.error is None]
    console.print(f"round {round_ + 1}, fastest step in ms: {', '.join(parts)}", style="dim")


def _plan(args: argparse.Namespace, workload: Workload, num_engines: int) -> Plan:
    large = workload.num_params > 100e6
    num_rounds = args.rounds or (2 if args.quick else 3 if large else 5)
    num_steps = args.steps or (3 if args.quick else 2 if large else 5)
    # Weights, gradients and two moments for each rank at most, plus the process itself.
    per_engine = args.ranks * (16 * workload.num_params + 400 * 2**20)
    fits = num_engines * per_engine < 0.6 * machine.available_bytes()
    processes = args.processes
    if processes == "auto":
        processes = "keep" if fits else "fresh"
    return Plan(
        args.ranks, num_rounds, num_steps, args.optimizer, args.lr, not args.no_memory, processes
    )


def _tokens(args: argparse.Namespace, workload: Workload, precision: str, console: Console) -> int:
    """Tokens per rank; few where bf16 products have no fast path and would hide all else."""
    if args.tokens or precision != "bf16":
        return args.tokens or workload.num_tokens
    slowdown = machine.bf16_slowdown()
    if slowdown < 8:
        return workload.num_tokens
    num_tokens = min(workload.num_tokens, NUM_TOKENS_SLOW_BF16)
    console.print(
        f"bf16 matrix products take {slowdown:.0f} times as long as fp32 ones on this CPU: "
        f"{num_tokens} tokens per rank instead of {workload.num_tokens} (--tokens overrides)"
    )
    return num_tokens


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workload", default="50M,185M", help=f"of {', '.join(WORKLOADS)}; several with commas")
    add("--precision", default="fp32,bf16", help="fp32, bf16; several with commas")
    add("--engines", default=ENGINES, help=f"see trainers.py; default {ENGINES}")
    add("--ranks", type=int, default=2)
    add("--tokens", type=int, default=0, help="tokens per rank, instead of the workload's own")
    add("--rounds", type=int, default=0, help="default 5, for 185M 3")
    add("--steps", type=int, default=0, help="timed steps in a round; default 5, for 185M 2")
    add("--optimizer", choices=OPTIMIZERS, default="fused", help="implementation of AdamW")
    add("--lr", type=float, default=3e-4)
    add("--processes", choices=("auto", "keep", "fresh"), default="auto")
    add("--no-memory", action="store_true", help="skip the memory pass")
    add("--quick", action="store_true", help="tiny model, 2 rounds of 3 steps")
    add("--json", metavar="PATH", help="write the JSON line there too")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
