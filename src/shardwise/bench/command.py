"""The command line of `bench`: arguments to a checked plan, comparisons to console and files.

Exit codes: 0 all that ran train the same model; 1 one does not (INVALID) or has failed; 2 a user's
mistake (one line on stderr); 130 interrupted. Nothing here needs torch before a plan is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.bench.engines import KINDS, OPTIONS, STRATEGIES, parse_engines
from shardwise.bench.workload import (
    WORKLOADS,
    DecoderWorkload,
    Precision,
    Workload,
    workload_named,
)
from shardwise.comm.choose import names
from shardwise.errors import ConfigError
from shardwise.train.options import CommandParser, count_to, number
from shardwise.units import full_name

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.bench.compare import Plan
    from shardwise.bench.rows import Comparison

NUM_TOKENS_SLOW_BF16 = 8
_ABOUT = """\
Train one model with every engine that is installed, in turn, in one run: step time, memory,
communication, and whether all of them train the same model.

  shardwise bench                                         a 23M decoder, under 5 minutes on 2 cores
  shardwise bench --model mine:model --batch mine:batch   your own (docs/benchmarks.md)
  shardwise bench job.toml                                the model and data of `shardwise train`
  shardwise bench --engines shardwise:shard_grad_op:c10d,fsdp2:keep,floor
"""


def main(arguments: Sequence[str]) -> int:
    """Runs `bench` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        parser().print_help()
        return 0
    try:
        args = parser().parse_args(arguments)
        workload, defaults = _workload(args)
        _check_files(args.json, args.figure)
        check_only(args)
        return _run(args, workload, defaults)
    except ConfigError as error:
        print(f"shardwise bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardwise bench: interrupted; its ranks have ended", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """All options, with their help."""
    engines = "\n".join(f"  {name:16}{kind.about}" for name, kind in KINDS.items())
    options = "\n".join(f"  {name:16}{text}" for name, text in OPTIONS.items())
    strategies = f"  {'shardwise:':16}{', '.join((*names(), *STRATEGIES[:4]))}"
    result = CommandParser(
        prog="shardwise bench",
        description=_ABOUT,
        epilog=f"engines:\n{engines}\ntheir options, behind colons:\n{strategies}\n{options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a configuration of shardwise train")
    add("--model", metavar="M:F", help="module:function that returns your model")
    add("--batch", metavar="M:F", help="module:function(index) that returns a micro-batch")
    add("--unit", help="what is gathered together: auto, class or module names, bytes")
    add("--workload", metavar="NAME", help=f"built-in decoder: {', '.join(WORKLOADS)} (23M)")
    add("--engines", default="installed", help="with commas; also: installed (default), all")
    add("--precision", help="fp32, bf16, or both with a comma (fp32)")
    add(
        "--nproc",
        type=count_to(65_536),
        default=2,
        metavar="N",
        help="ranks, on this machine's CPU (2)",
    )
    add("--threads", type=count_to(65_536), metavar="N", help="of each rank (cores / ranks)")
    add("--micro-batches", type=count_to(65_536), metavar="N", help="of a rank in each step (1)")
    add("--rounds", type=count_to(65_536), default=3, metavar="N", help="turns of each engine (3)")
    add("--steps", type=count_to(65_536), default=3, metavar="N", help="timed steps in a turn (3)")
    add("--limit-s", type=number, default=270.0, metavar="S", help="0: no limit (270)")
    add("--optimizer", choices=("fused", "foreach", "loop"), default="fused", help="of AdamW")
    add("--lr", type=number, metavar="LR", help="learning rate (3e-4)")
    add("--no-memory", action="store_true", help="leave out the pass that measures memory")
    add("--only", choices=("memory",), help="no timed steps: memory, traffic and loss alone")
    add("--cgroup", metavar="DIR", help="measure memory in this cgroup instead of by summed PSS")
    add("--json", metavar="FILE", help="write the result there too; it is the last line of stdout")
    add("--figure", metavar="FILE", help="draw it (.png, .svg, .pdf)")
    return result


def _workload(args: argparse.Namespace) -> tuple[list[Workload], dict[str, Any]]:
    """What to train, and the defaults that follow from a configuration."""
    own = [name for name in ("config", "model", "workload") if getattr(args, name)]
    if len(own) > 1:
        raise ConfigError(f"{' and '.join(own)}: each says what to train; keep one")
    if bool(args.model) != bool(args.batch):
        missing = "--batch" if args.model else "--model"
        raise ConfigError(f"{missing}: needed too; --model and --batch belong together")
    unit = _unit(args.unit)
    if args.model:
        from shardwise.bench.user import UserWorkload

        return [UserWorkload(args.model, args.batch, unit)], {}
    if args.config:
        from shardwise.bench.user import ConfigWorkload

        found = ConfigWorkload.of(args.config)
        config = found.config
        found = replace(found, unit=unit) if args.unit else found
        per_pass = args.nproc * config.train.micro_batch
        return [found], {
            "precision": "bf16" if config.shard.param_dtype == "bfloat16" else "fp32",
            "micro_batches": max(1, config.train.global_batch // per_pass),
            "lr": config.optim.lr,
        }
    names = (args.workload or "23M").split(",")
    return [replace(workload_named(name), unit=unit) for name in names], {}


def _run(args: argparse.Namespace, workloads: list[Workload], defaults: dict[str, Any]) -> int:
    from shardwise.bench.compare import Plan

    precisions = _precisions(args.precision or defaults.get("precision", "fp32"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    plan = Plan(
        workload=workloads[0],
        precision="fp32",
        specs=tuple(parse_engines(args.engines)),
        num_ranks=args.nproc,
        num_micro_batches=args.micro_batches or defaults.get("micro_batches", 1),
        num_rounds=0 if args.only else args.rounds,
        num_steps=args.steps,
        num_threads=args.threads or max(1, (cores or 1) // args.nproc),
        optimizer=args.optimizer,
        lr=args.lr or defaults.get("lr", 3e-4),
        with_memory=not args.no_memory,
        cgroup=args.cgroup or "",
    )
    plans = [replace(plan, workload=w, precision=p) for w in workloads for p in precisions]
    return run_plans(plans, args.limit_s, args.json, args.figure)


def _precisions(text: str) -> list[Precision]:
    known: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}
    for word in text.split(","):
        if full_name(word) not in known:
            raise ConfigError(f"--precision: there are fp32 and bf16, found {word!r}")
    return list(dict.fromkeys(known[full_name(word)] for word in text.split(",")))


def run_plans(
    plans: list[Plan], limit_s: float, json_file: str | None, figure_file: str | None
) -> int:
    """Measure all plans and show them; the exit code."""
    from shardwise.bench import machine
    from shardwise.bench.compare import compare
    from shardwise.bench.group import Deadline
    from shardwise.bench.table import LEGEND, show
    from shardwise.train.columns import console_of

    signal.signal(signal.SIGTERM, _interrupt)
    errors, out = console_of(sys.stderr), console_of(sys.stdout)
    facts, deadline = machine.describe(), Deadline(limit_s)
    comparisons: list[Comparison] = []
    result: dict[str, Any] = {
        "benchmark": "engines",
        "schema": 2,
        **facts,
        "adamw": plans[0].optimizer,
        "threads_per_rank": plans[0].num_threads,
        "memory_by": "cgroup" if plans[0].cgroup else "summed PSS",
        "comparisons": [],
    }
    for plan in plans:
        sized = replace(plan, workload=sized_for(plan.workload, plan.precision, errors))
        comparisons.append(compare(sized, errors, deadline))
        show(out, comparisons[-1])
        result["comparisons"].append(comparisons[-1].as_json())
        if json_file:  # now: who ends the rest early keeps what is measured
            Path(json_file).write_text(json.dumps(result) + "\n")
    out.print(LEGEND, style="dim")
    out.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    line = json.dumps(result)
    if figure_file:
        from shardwise.bench.figure import draw

        draw([c.as_json() for c in comparisons], Path(figure_file))
    print(line)
    return 0 if all(c.is_sound for c in comparisons) else 1


def check_only(args: argparse.Namespace) -> None:
    if args.only and (args.no_memory or args.figure):
        raise ConfigError("--only memory: takes no times; leave out --no-memory and --figure")


def sized_for(workload: Workload, precision: str, console: Console) -> Workload:
    """Few tokens where bf16 products have no fast path and would hide all else."""
    if precision != "bf16" or not isinstance(workload, DecoderWorkload):
        return workload
    from shardwise.bench import machine

    slowdown = machine.bf16_slowdown()
    num_tokens = min(workload.num_tokens, NUM_TOKENS_SLOW_BF16)
    if slowdown < 8 or num_tokens == workload.num_tokens:
        return workload
    console.print(
        f"bf16 matrix products take {slowdown:.0f} times as long as fp32 ones on this CPU: "
        f"{num_tokens} tokens per rank instead of {workload.num_tokens}"
    )
    return replace(workload, num_tokens=num_tokens)


def _unit(text: str | None) -> str | int | tuple[str, ...]:
    if not text or text == "auto":
        return "auto"
    if text.isdecimal():
        return int(text)
    return tuple(text.split(",")) if "," in text else text


def _check_files(*names: str | None) -> None:
    """Before minutes are spent on measuring."""
    for option, name in zip(("--json", "--figure"), names, strict=True):
        if name and not Path(name).resolve().parent.is_dir():
            raise ConfigError(f"{option}: there is no folder {Path(name).resolve().parent}")
        if option == "--figure" and name and Path(name).suffix not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--figure: {name}: expected a name that ends with .png, .svg, .pdf")
        if option == "--figure" and name and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--figure: needs matplotlib; pip install matplotlib")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
