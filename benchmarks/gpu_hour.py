"""One command for a machine with 1 to 8 GPUs: is the engine right there, and how fast is it?

    python benchmarks/gpu_hour.py                   an hour at most; writes gpu_hour.json
    python benchmarks/gpu_hour.py --minutes 20      less: what has no time is listed as not run
    python benchmarks/gpu_hour.py --dry             sizes for a minute on the CPU: does it run?
    python benchmarks/gpu_hour.py --stages parity,cases --ranks 2

It starts its own ranks, one for each GPU. (Under torchrun only the first process does anything, and
starts as many as there are.) Every stage has processes of its own and a time limit: what crashes or
hangs is listed with its error, and the next item starts on fresh ranks.

    environment   GPUs, driver, torch, NCCL, links
    parity        losses, gradients and weights of each strategy beside a plain model, fp32 and bf16
    cases         accumulation, clipping, offload, checkpoints, streams, graphs, ...
    tests         the project's tests with the mark gpu
    sanitizer     torch's CUDA sanitizer over steps of each strategy
    predicted     peaks of memory by the model of `allocator.py`, beside ...
    memory        ... the allocator's own
    overlap       the share of communication that runs beside computation, by torch's profiler
    speed         step time, host time and memory beside torch's FSDP2 and DDP, 125M to 8B

The file holds everything, also the environment variables of NCCL, CUDA and torch; nothing is sent
anywhere. The exit code is 1 where something is wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_hour_parts.device import KINDS, TESTS, Device
from gpu_hour_parts.launch import Result, run_stage
from gpu_hour_parts.settings import Settings
from gpu_hour_parts.stages import STAGES
from gpu_hour_parts.table import show_all, show_stage, summary
from shardwise.bench.machine import describe
from shardwise.train.columns import console_of


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if os.environ.get("RANK", "0") != "0":  # torchrun's other processes
        return 0
    kind = args.device or ("cpu" if args.dry else "cuda")
    sys.path.append(str(TESTS))
    device = Device(kind)
    if why := device.why_not():
        parser.error(why)
    names = args.stages.split(",") if args.stages else list(STAGES)
    for name in names:
        if name not in STAGES:
            parser.error(f"--stages: no stage {name!r}; there are {', '.join(STAGES)}")
    world = args.ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or device.count()
    if kind == "cuda" and world > device.count():
        parser.error(f"--ranks: {world} ranks, but {device.count()} GPUs")
    if args.keep and Path(args.keep).exists() and any(Path(args.keep).iterdir()):
        parser.error(f"--keep: {args.keep} is not empty; name a new directory")
    folder = Path(args.keep or tempfile.mkdtemp(prefix="gpu_hour_")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(kind, world, args.dry or kind != "cuda", str(folder))
    settings.write()
    try:
        return _run(names, settings, args)
    except KeyboardInterrupt:
        print(f"interrupted; {args.json} has the stages that ended", file=sys.stderr)
        return 130
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _run(names: list[str], settings: Settings, args: argparse.Namespace) -> int:
    deadline, results = time.monotonic() + 60 * args.minutes, list[Result]()
    console = console_of(sys.stdout)
    head = {"benchmark": "gpu_hour", **describe(), **_head(settings, args)}
    left = sum(STAGES[name].minutes for name in names)
    for name in names:
        stage = STAGES[name]
        remaining = max(0.0, deadline - time.monotonic())
        limit_s = remaining * stage.minutes / left  # what a stage leaves, the next ones have
        left -= stage.minutes
        print(f"{name}: at most {limit_s / 60:.1f} minutes", file=sys.stderr)
        results.append(run_stage(stage, settings, limit_s))
        said = results[-1].why or summary(results[-1].rows)
        print(f"{name}: {said}; {results[-1].seconds:.0f} s", file=sys.stderr)
        result = {**head, "stages": {r.stage.name: r.as_json() for r in results}}
        _write(Path(args.json), result)
    for found in results:
        show_stage(console, found)
    show_all(console, results)
    print(f"all of it is in {args.json}", file=sys.stderr)
    print(json.dumps(result))
    return int(any(found.state in ("wrong", "failed") for found in results))


def _head(settings: Settings, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": settings.kind,
        "ranks": settings.world,
        "dry": settings.is_dry,
        "minutes": args.minutes,
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="for everything together")
    add("--dry", action="store_true", help="tiny sizes on the CPU, 2 ranks on Gloo")
    add("--device", choices=KINDS, help="default cuda; cpu with --dry; others are dry too")
    add("--ranks", type=int, default=0, help="default: one for each GPU, 8 at most; 2 on CPU")
    add("--stages", help=f"of {', '.join(STAGES)}; several with commas; default all")
    add("--json", metavar="PATH", default="gpu_hour.json", help="the result; default %(default)s")
    add("--keep", metavar="DIR", help="keep logs, traces and snapshots of memory there")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
