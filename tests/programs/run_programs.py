"""Run many random programs and say what became of them; `make test-all` does.

    python tests/programs/run_programs.py --seeds 0:700 --worlds 2,3,4 --modes any,c10d
    python tests/programs/run_programs.py --repeat 7 --worlds 4 --slow      one seed again and again
    python tests/programs/run_programs.py --device sim                      on the simulated device

Prints a line for each program that failed, and one JSON line at the end; exit code 1 where one
failed. `--slow` makes ranks wait at random moments, so that other orders of events are met.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from program_runs import MODES, NOT_ON_DEVICES, Options, run_seed  # noqa: E402 - needs the line above

import ranks  # noqa: E402 - likewise
import shardwise as sw  # noqa: E402 - likewise
import simulated_device  # noqa: E402 - likewise
from simulated_device.worlds import run_on_devices  # noqa: E402 - likewise

SEEDS_A_CALL = 10


def slow_down(rank: int, seed: int) -> None:
    """Wait for up to 10 ms before one call in five of a transport's, in this process for good."""
    from shardwise.comm.c10d.transport import C10dTransport
    from shardwise.comm.shared_memory.domain import Domain
    from shardwise.comm.shared_memory.mailbox import Mailbox
    from shardwise.comm.shared_memory.transport import SharedMemoryTransport

    draws = random.Random(f"{rank} {seed}")

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if draws.random() < 0.2:
                time.sleep(draws.random() * 0.01)
            return call(*args, **kwargs)

        wrapper.is_slow = True  # type: ignore[attr-defined]
        return wrapper

    for owner in (C10dTransport, Domain, Mailbox, SharedMemoryTransport):
        for name, call in list(vars(owner).items()):
            if callable(call) and name[0] != "_" and not hasattr(call, "is_slow"):
                setattr(owner, name, slowly(call))


def run_some(rank: int, world: int, seeds: list[int], options: Options, slow: bool) -> None:
    """On every rank; raises at the first seed that fails."""
    warnings.simplefilter("ignore")
    sw.set_wait_limit(20)
    if options.device != "cpu":
        run_on_device(rank, world, seeds, options, slow)
        return
    if slow:
        slow_down(rank, seeds[0])
    for seed in seeds:
        run_seed(rank, world, seed, options)


def run_on_device(rank: int, world: int, seeds: list[int], options: Options, slow: bool) -> None:
    """On the simulated device, which has to see no race; its streams are held back, not calls."""
    for seed in seeds:
        simulated_device.clear()
        if slow:
            simulated_device.slow_down(300, seed=1000 * seed + rank)
        trace = run_seed(rank, world, seed, options)
        races = simulated_device.report().races
        named = f"seed {seed} on {world} ranks races"
        assert not races, "\n".join(["", named, *trace, *races[:20]])


def report_of(
    world: int, seeds: list[int], options: Options, slow: bool, limit_s: float
) -> tuple[int | None, str]:
    """The first seed that failed, with what the ranks said."""
    run_ranks = ranks.run_ranks if options.device == "cpu" else run_on_devices
    try:
        run_ranks(world, run_some, seeds, options, slow, timeout_s=limit_s)
    except ranks.RankError as error:
        text = str(error)
        named = [int(seed) for seed in re.findall(r"^ *seed (\d+) on ", text, re.MULTILINE)]
        return min(named, default=seeds[0]), text
    return None, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:100", help="first:last, last not included")
    parser.add_argument("--repeat", type=int, help="this seed only, as often as --seeds counts")
    parser.add_argument("--worlds", default="2,3,4")
    parser.add_argument("--modes", default="any", help=", ".join(MODES))
    parser.add_argument("--device", default="cpu", help="or sim: docs/accelerators.md")
    parser.add_argument("--without", default="", help="kinds and actions to leave out")
    parser.add_argument("--odds", type=float, default=0.09, help="of an action before a step")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument(
        "--limit", type=float, default=240, help=f"seconds for {SEEDS_A_CALL} of them"
    )
    parser.add_argument("--budget", type=float, default=3600, help="seconds")
    args = parser.parse_args()
    first, last = map(int, args.seeds.split(":"))
    without = tuple(args.without.split(",")) + (() if args.device == "cpu" else NOT_ON_DEVICES)
    options = {
        mode: Options(mode, without, args.odds, args.device) for mode in args.modes.split(",")
    }
    started_s, num_right, failed = time.monotonic(), 0, []
    for start in range(first, last, SEEDS_A_CALL):
        for world in map(int, args.worlds.split(",")):
            for mode, chosen in options.items():
                left = list(range(start, min(start + SEEDS_A_CALL, last)))
                if args.repeat is not None:
                    left = [args.repeat] * len(left)
                while left and time.monotonic() - started_s < args.budget:
                    seed, text = report_of(world, left, chosen, args.slow, args.limit)
                    if seed is None:
                        num_right += len(left)
                        break
                    at = left.index(seed)
                    num_right += at
                    left = left[at + 1 :]
                    failed.append({"world": world, "mode": mode, "seed": seed})
                    print(f"--- seed {seed}, {world} ranks, {mode}\n{text}", flush=True)
    ranks.close_all()
    elapsed_s = round(time.monotonic() - started_s, 1)
    print(json.dumps({"right": num_right, "failed": failed, "elapsed_s": elapsed_s}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
