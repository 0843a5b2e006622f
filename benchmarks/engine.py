"""The standard set: shardwise beside every peer that is installed, through `shardwise bench`.

    python benchmarks/engine.py                     all cases, written to benchmarks/results/
    python benchmarks/engine.py --case 50M_fp32     some of them, with commas
    python benchmarks/engine.py --only memory       peak memory of the rows that have a goal for it
    python benchmarks/engine.py --short             one round of two steps each: does it all work?
    python benchmarks/engine.py --quick             a tiny model, written nowhere
    python benchmarks/engine.py --workload 50M --precision fp32 --engines shardwise,fsdp2,floor

Method: benchmarks/README.md. Each case writes its JSON and figure when it is done, so that an
interrupted run keeps what it has. The last line of stdout is the last result.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.bench.command import check_only, run_plans
from shardwise.bench.compare import Plan
from shardwise.bench.engines import parse_engines
from shardwise.bench.trainers import OPTIMIZERS
from shardwise.bench.workload import WORKLOADS, workload_named
from shardwise.errors import ConfigError

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = "fsdp2,fsdp2:keep,ddp,fsdp1,deepspeed:1,deepspeed:2,deepspeed:3,megatron_fsdp,fairscale"
ALL = f"shardwise,shardwise:shard_grad_op,shardwise:c10d,{PEERS},floor"
MICRO = (
    "shardwise:shard_grad_op,shardwise:shard_grad_op:last,shardwise:shard_grad_op:c10d,"
    "fsdp2,fsdp2:keep:last,fsdp2:keep:hold:last,ddp:last,floor"
)

COMPILED = (
    "shardwise:compile,shardwise:c10d:compile,fsdp2:compile,ddp:compile,floor:compile,shardwise"
)


@dataclass(frozen=True)
class Case:
    """One line of the standard set; zeros: what suits the size of the workload."""

    workload: str
    precision: str
    engines: str = ALL
    num_ranks: int = 2
    num_micro_batches: int = 1
    num_tokens: int = 0
    num_rounds: int = 0
    num_steps: int = 0


CASES = {
    "50M_fp32": Case("50M", "fp32"),
    "50M_bf16": Case("50M", "bf16"),
    "50M_fp32_4ranks": Case("50M", "fp32", num_ranks=4, num_tokens=128),
    "50M_fp32_8micro": Case(
        "50M", "fp32", MICRO, num_micro_batches=8, num_tokens=128, num_rounds=3, num_steps=2
    ),
    "50M_fp32_compile": Case("50M", "fp32", COMPILED),
    "185M_fp32": Case("185M", "fp32"),
    "185M_bf16": Case("185M", "bf16"),
}

# Beside FSDP2's defaults and DDP, which each row has to stay below.
_MEMORY = "shardwise,shardwise:c10d,fsdp2,ddp,floor"
_IN_BACKWARD = "shardwise,shardwise:in_backward,shardwise:c10d"
_MICRO_MEMORY = "shardwise:shard_grad_op,shardwise:shard_grad_op:c10d,fsdp2,ddp:last,floor"
MEMORY_CASES = {
    "50M_fp32": Case("50M", "fp32", _MEMORY),
    "50M_bf16": Case("50M", "bf16", _MEMORY),
    "50M_fp32_4ranks": Case("50M", "fp32", _MEMORY, num_ranks=4, num_tokens=128),
    "50M_fp32_8micro": Case("50M", "fp32", _MICRO_MEMORY, num_micro_batches=8, num_tokens=128),
    "185M_fp32": Case("185M", "fp32", f"{_IN_BACKWARD},fsdp2,ddp,floor"),
}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        check_only(args)
        if args.workload or args.quick:
            return _chosen(args)
        if args.only:
            return _memory(args)
        return _standard(args)
    except ConfigError as error:
        print(f"benchmarks/engine.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks/engine.py: interrupted; its ranks have ended", file=sys.stderr)
        return 130


def _names(args: argparse.Namespace, cases: dict[str, Case]) -> list[str]:
    names = args.case.split(",") if args.case else list(cases)
    for name in names:
        if name not in cases:
            raise ConfigError(f"--case: no case {name!r}; there are {', '.join(cases)}")
    return names


def _memory(args: argparse.Namespace) -> int:
    """All cases in one file: they take no times, so none has to have the machine to itself."""
    plans = [_plan(MEMORY_CASES[name], args) for name in _names(args, MEMORY_CASES)]
    folder, today = Path(args.results), datetime.datetime.now(datetime.UTC).date()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = f"_{args.case.replace(',', '_')}" if args.case else ""
    return run_plans(plans, args.limit_s, str(folder / f"{today}_memory{chosen}.json"), None)


def _standard(args: argparse.Namespace) -> int:
    names = _names(args, CASES)
    folder, today = Path(args.results), datetime.datetime.now(datetime.UTC).date()
    folder.mkdir(parents=True, exist_ok=True)
    code = 0
    for name in names:
        stem = folder / f"{today}_{name}{'_short' if args.short else ''}"
        plan = _plan(CASES[name], args)
        print(f"case {name}", file=sys.stderr)
        code |= run_plans([plan], args.limit_s, f"{stem}.json", f"{stem}.png")
    return code


def _chosen(args: argparse.Namespace) -> int:
    """What the options name, without the standard set."""
    names = ["tiny"] if args.quick else args.workload.split(",")
    precisions = (args.precision or ("fp32" if args.quick else "fp32,bf16")).split(",")
    plans = [
        _plan(Case(name, precision, num_ranks=args.ranks), args)
        for name in names
        for precision in precisions
    ]
    return run_plans(plans, args.limit_s, args.json, args.figure)


def _plan(case: Case, args: argparse.Namespace) -> Plan:
    workload = workload_named(case.workload)
    num_tokens = args.tokens or case.num_tokens or workload.num_tokens
    large = case.workload == "185M"
    num_rounds = args.rounds or case.num_rounds or (2 if args.quick else 3 if large else 5)
    num_steps = args.steps or case.num_steps or (3 if args.quick else 2 if large else 5)
    if args.short:
        num_rounds, num_steps = 1, 2
    if args.only:
        num_rounds = 0
    return Plan(
        workload=replace(workload, num_tokens=num_tokens),
        precision=case.precision,
        specs=tuple(parse_engines(args.engines or case.engines)),
        num_ranks=case.num_ranks,
        num_micro_batches=args.micro_batches or case.num_micro_batches,
        num_rounds=num_rounds,
        num_steps=num_steps,
        num_warmup=1 if large or args.short else 2,
        optimizer=args.optimizer,
        lr=args.lr,
        with_memory=not args.no_memory,
        cgroup=args.cgroup,
        processes=args.processes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--case", help=f"of {', '.join(CASES)}; several with commas; default all")
    add("--results", default=str(RESULTS), metavar="DIR", help="where cases are written")
    add("--short", action="store_true", help="one round of two steps; files end with _short")
    add("--workload", help=f"instead of cases: {', '.join(WORKLOADS)}; several with commas")
    add("--precision", help="with --workload: fp32, bf16; default both")
    add("--engines", help=f"default {ALL}")
    add("--ranks", type=int, default=2, help="with --workload")
    add("--tokens", type=int, default=0, help="tokens per micro-batch and rank")
    add("--micro-batches", type=int, default=0)
    add("--rounds", type=int, default=0, help="default 5, for 185M 3")
    add("--steps", type=int, default=0, help="timed steps in a round; default 5, for 185M 2")
    add("--optimizer", choices=OPTIMIZERS, default="fused", help="implementation of AdamW")
    add("--lr", type=float, default=3e-4)
    add("--limit-s", type=float, default=0.0, help="time limit of a case; 0: none")
    add("--processes", choices=("auto", "keep", "fresh"), default="auto")
    add("--only", choices=("memory",), help="no timed steps; all cases in one file")
    add("--no-memory", action="store_true", help="skip the memory pass")
    add("--cgroup", default="", metavar="DIR", help="measure memory in this cgroup")
    add("--quick", action="store_true", help="tiny model, 2 rounds of 3 steps")
    add("--json", metavar="PATH", help="with --workload: write the JSON line there too")
    add("--figure", metavar="PATH", help="with --workload: draw it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
