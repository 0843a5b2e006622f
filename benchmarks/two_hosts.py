"""Two hosts with a slow cable between them, on one machine: hybrid_shard against full_shard, beside
torch's FSDP2 and HSDP.

    sudo python benchmarks/two_hosts.py            2 x 1 and 2 x 2 ranks, 10 and 1 Gbit/s: 8 minutes
    sudo python benchmarks/two_hosts.py --layouts 2x2 --gbit 1 --json PATH
    sudo python benchmarks/two_hosts.py --quick    a tiny model: does it all work?

The hosts are network namespaces joined by a veth pair behind a token bucket (`testbed.py`): needs
root, `iproute2` and a kernel that has them, else the last line says why and the exit code is 0.
Each host has a launcher of its own (torchrun). One run, turns: in each round each engine takes its
steps; the figure is the fastest of the rounds. Bytes are counted where they leave a host, and have
to be what the layout predicts, headers and acknowledgements included, to 3%.

Exit code 1: a rank failed, an engine that sums exactly has another loss, or bytes are not as
predicted. 2: a mistake in the arguments. 130: interrupted. The testbed is gone in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import testbed
from shardwise.bench.engines import parse_engine
from shardwise.bench.machine import describe
from shardwise.bench.workload import WORKLOADS, workload_named
from shardwise.errors import ConfigError
from shardwise.train.columns import Column, console_of, print_columns

RANK = Path(__file__).with_name("two_hosts_rank.py")
PORT = 29500  # of the first host, which nobody else can reach
BYTES_TOLERANCE, LOSS_TOLERANCE, ROUNDED_TOLERANCE = 0.03, 1e-3, 5e-2
QUICK_TOLERANCE = 0.10  # barriers and what ranks tell each other weigh more in a tiny step
LAYOUTS = {"2x1": 1, "2x2": 2}

# Name: engine in the words of `shardwise bench`. Under hybrid_shard gathers stay inside hosts, and
# travel exactly.
ENGINES = {
    "shardwise full": "shardwise:full_shard:c10d",
    "shardwise full bf16": "shardwise:full_shard:c10d:gather_bf16:reduce_bf16",
    "shardwise full int8": "shardwise:full_shard:c10d:gather_int8:reduce_int8",
    "shardwise hosts": "shardwise:full_shard:c10d:by_hosts",
    "shardwise hosts int8": "shardwise:full_shard:c10d:gather_int8:reduce_int8:by_hosts",
    "shardwise hybrid": "shardwise:hybrid_shard:c10d",
    "shardwise hybrid bf16": "shardwise:hybrid_shard:c10d:reduce_bf16",
    "shardwise hybrid int8": "shardwise:hybrid_shard:c10d:reduce_int8",
    "fsdp2 full": "fsdp2",
    "fsdp2 full bf16": "fsdp2:reduce_bf16",
    "fsdp2 hybrid": "fsdp2:hybrid",
    "fsdp2 hybrid bf16": "fsdp2:hybrid:reduce_bf16",
}
BY_HOSTS = ("shardwise hosts", "shardwise hosts int8")  # where a host has several ranks
_FULL, _HYBRID = ("fsdp2 full", "fsdp2 full bf16"), ("fsdp2 hybrid", "fsdp2 hybrid bf16")
# At 1 Gbit/s: ours, peers, the most that ours may take of the fastest of them.
GOALS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("shardwise full", _FULL[:1], 1.0),
    ("shardwise full bf16", _FULL[:1], 0.7),
    ("shardwise full bf16", _FULL[1:], 1.0),
    ("shardwise full int8", _FULL, 0.5),
    ("shardwise hybrid", _HYBRID[:1], 1.0),
    ("shardwise hybrid bf16", _HYBRID[:1], 0.7),
    ("shardwise hybrid bf16", _HYBRID[1:], 1.0),
    ("shardwise hybrid int8", _FULL + _HYBRID, 0.5),
)


def main(argv: list[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        layouts, profiles, names = _chosen(args)
        if args.json and not Path(args.json).resolve().parent.is_dir():
            raise ConfigError(f"--json: there is no folder {Path(args.json).resolve().parent}")
    except ConfigError as error:
        print(f"benchmarks/two_hosts.py: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    result: dict[str, Any] = {"benchmark": "two_hosts", "schema": 1, **describe()}
    try:
        if num := testbed.clean():
            print(f"two_hosts: ended {num} processes of a run that was killed", file=sys.stderr)
        if why := testbed.why_not():
            return _tell(result | {"skipped": why}, args.json)
        result |= {"hosts": 2, "mtu": testbed.MTU, "bucket_bytes": testbed.BURST_BYTES}
        result |= {"fastest_of_rounds": args.rounds, "steps_in_a_round": args.steps}
        result |= {"workload": args.workload, "tokens_per_rank": args.tokens, "layouts": {}}
        limit_s = args.limit_s / len(layouts)
        for layout in layouts:
            ranks = LAYOUTS[layout]
            rows = [name for name in names if ranks > 1 or name not in BY_HOSTS]
            found = run_layout(_plan(args, profiles, rows, limit_s), ranks)
            tolerance = QUICK_TOLERANCE if args.quick else BYTES_TOLERANCE
            result["layouts"][layout] = summary(found, rows, profiles, tolerance)
            show(layout, result["layouts"][layout])
    except testbed.BedError as error:
        return _tell(result | {"skipped": str(error)}, args.json)
    except JobFailed as error:
        print(f"benchmarks/two_hosts.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks/two_hosts.py: interrupted; hosts and cable are gone", file=sys.stderr)
        return 130
    is_sound = all(profile["problems"] == [] for profile in _profiles_of(result))
    return _tell(result, args.json) or (0 if is_sound else 1)


class JobFailed(RuntimeError):  # noqa: N818 - as in `shardwise bench`
    """A rank, or a launcher, ended badly."""


def _plan(
    args: argparse.Namespace, profiles: list[testbed.Profile], names: list[str], limit_s: float
) -> dict[str, Any]:
    """What `two_hosts_rank.Plan` says."""
    workload = workload_named(args.workload)
    return {
        "engines": [ENGINES[name] for name in names],
        "profiles": [(profile.gbit_s, profile.delay_ms) for profile in profiles],
        "layers": workload.layers, "dim": workload.dim, "heads": workload.heads,
        "num_tokens": args.tokens, "vocab_size": workload.vocab_size,
        "num_rounds": args.rounds, "num_steps": args.steps, "limit_s": limit_s,
    }  # fmt: skip


def run_layout(plan: dict[str, Any], ranks_per_host: int) -> dict[str, Any]:
    """One job over both hosts; what rank 0 wrote."""
    profile = testbed.Profile(*plan["profiles"][0])
    with tempfile.TemporaryDirectory(prefix="shardwise-bed-") as folder:
        plan = plan | {"answer": str(Path(folder, "answer.json"))}
        plan_file = Path(folder, "plan.json")
        plan_file.write_text(json.dumps(plan))
        with testbed.TwoHosts(profile) as bed:
            words = (str(RANK), str(plan_file))
            launchers = [start(host, bed, ranks_per_host, *words) for host in bed.hosts]
            _wait(launchers, plan["limit_s"] + 120)
        return json.loads(Path(plan["answer"]).read_text())


def start(
    host: testbed.Host,
    bed: testbed.TwoHosts,
    ranks_per_host: int,
    *script: str,
    output: Any = sys.stderr,
) -> subprocess.Popen[bytes]:
    """A launcher in a host. What it and its ranks say goes to `output`."""
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host.index}",
        f"--nproc-per-node={ranks_per_host}", f"--master-addr={bed.hosts[0].address}",
        f"--master-port={PORT}", f"--local-addr={host.address}", *script,
    ]  # fmt: skip
    # Ranks of one host reach each other by the same address; that does not touch the cable.
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": testbed.CABLE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # there is no name server
        "LOGLEVEL": "CRITICAL",  # one launcher ends before the other
    }
    return subprocess.Popen(
        host.command(*words), env=environment, stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _wait(launchers: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """Until both have ended. Who is left when one has failed ends with its host."""
    end = time.monotonic() + limit_s
    while any(launcher.poll() is None for launcher in launchers):
        codes = [launcher.poll() for launcher in launchers]
        if any(codes):
            time.sleep(2)  # what the other has to say
            break
        if time.monotonic() > end:
            raise JobFailed(f"no end after {limit_s:.0f} s")
        time.sleep(0.05)
    codes = [launcher.poll() for launcher in launchers]
    if any(code != 0 for code in codes):
        shown = " and ".join("still ran" if code is None else str(code) for code in codes)
        raise JobFailed(f"the launchers of the two hosts ended with {shown}")


def summary(
    found: dict[str, Any],
    names: list[str],
    profiles: list[testbed.Profile],
    tolerance: float = BYTES_TOLERANCE,
) -> dict[str, Any]:
    """What rank 0 wrote, by the names of the rows, with ratios, goals and what is wrong."""
    result: dict[str, Any] = {"num_params": found["num_params"], "profiles": {}}
    for profile, measured in zip(profiles, found["profiles"], strict=True):
        rows = {
            name: row_of(measured["cells"][ENGINES[name]], found["predicted"][ENGINES[name]])
            for name in names
        }
        for name, row in rows.items():
            theirs = f"fsdp2 {'hybrid' if 'hybrid' in name else 'full'}"
            if theirs in rows:
                row["of_fsdp2"] = round(row["step_s"] / rows[theirs]["step_s"], 3)
        result["profiles"][profile.name] = {
            "gbit_s": profile.gbit_s,
            "delay_ms": profile.delay_ms,
            "reached_gbit_s": round(measured["reached_gbit_s"], 3),
            "rows": rows,
            "goals": goals_of(rows) if profile.gbit_s == 1 else [],
            "problems": problems_of(rows, tolerance),
        }
    return result


def row_of(cell: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """One engine under one profile. Of bytes the mean over rounds, for each host's direction; the
    error is that of the worst round and direction."""
    rounds, wire = cell["step_s"], cell["wire_bytes"]
    expected = predicted["wire_bytes"]
    errors = [
        sent / wanted - 1 for each in wire for sent, wanted in zip(each, expected, strict=True)
    ]
    return {
        "step_s": round(min(rounds), 4),
        "rounds_s": [round(seconds, 4) for seconds in rounds],
        "wire_bytes": [round(sum(each) / len(wire)) for each in zip(*wire, strict=True)],
        "interface_bytes": [
            round(sum(each) / len(wire)) for each in zip(*cell["interface_bytes"], strict=True)
        ],
        "predicted_bytes": [round(size) for size in expected],
        "predicted_by": predicted["by"],
        "bytes_error": round(max(errors, key=abs), 5),
        "dropped_packets": cell["dropped"],
        "loss": cell["loss"],
        "after_steps": cell["num_steps_done"],
    }


def goals_of(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Goals for the rows that there are."""
    found = []
    for ours, theirs, most in GOALS:
        peers = [name for name in theirs if name in rows]
        if ours not in rows or len(peers) < len(theirs):
            continue
        peer = min(peers, key=lambda name: rows[name]["step_s"])
        ratio = rows[ours]["step_s"] / rows[peer]["step_s"]
        goal = {"row": ours, "of": peer, "ratio": round(ratio, 3), "most": most}
        found.append(goal | {"reached": ratio <= most})
    return found


def problems_of(rows: dict[str, Any], of_bytes: float) -> list[str]:
    """Bytes that nobody predicted, and losses that differ."""
    found = []
    for name, row in rows.items():
        if abs(row["bytes_error"]) > of_bytes:
            found.append(f"{name}: {row['bytes_error']:+.1%} of the bytes that are predicted")
    first = next(iter(rows.values()))["loss"]  # of the exact ones, where there is one
    first = next((row["loss"] for name, row in rows.items() if not _is_rounded(name)), first)
    for name, row in rows.items():
        tolerance = ROUNDED_TOLERANCE if _is_rounded(name) else LOSS_TOLERANCE
        if abs(row["loss"] / first - 1) > tolerance:
            found.append(f"{name}: loss {row['loss']:.6f}, others {first:.6f}")
    return found


def _is_rounded(name: str) -> bool:
    return name.endswith(("bf16", "int8"))


def show(layout: str, found: dict[str, Any]) -> None:
    console = console_of(sys.stderr)
    for name, profile in found["profiles"].items():
        rows = profile["rows"]
        cells = [
            [
                row_name,
                f"{row['step_s']:.3f}",
                f"{max(row['rounds_s']):.3f}",
                f"{row['of_fsdp2']:.2f}" if "of_fsdp2" in row else "",
                f"{sum(row['wire_bytes']) / 2e6:,.1f}",
                f"{row['bytes_error']:+.2%}",
                f"{row['loss']:.5f}",
            ]
            for row_name, row in rows.items()
        ]
        titles = ("engine", "step s", "slowest", "of FSDP2", "MB out", "predicted", "loss")
        columns = zip(titles, zip(*cells, strict=True), strict=True)
        title = f"{layout} ranks, {name}, {profile['reached_gbit_s']:.2f} reached"
        print_columns(console, title, [Column(t, list(c), t != "engine") for t, c in columns])
        for goal in profile["goals"]:
            mark = "" if goal["reached"] else ", missed"
            said = f"{goal['row']} / {goal['of']}: {goal['ratio']:.2f} ({goal['most']:.2f}){mark}"
            console.print(said)
        for problem in profile["problems"]:
            console.print(f"WRONG {problem}")


def _profiles_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for layout in result["layouts"].values() for p in layout["profiles"].values()]


def _tell(result: dict[str, Any], path: str | None) -> int:
    """The last line, and the file; a skipped run writes none."""
    if path and "skipped" not in result:
        Path(path).write_text(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)
    return 0


def _chosen(args: argparse.Namespace) -> tuple[list[str], list[testbed.Profile], list[str]]:
    if args.quick:
        args.workload, args.tokens, args.rounds, args.steps = "tiny", 32, 1, 1
    layouts, names = args.layouts.split(","), args.engines.split(",")
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ConfigError(f"--layouts: no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    for name in names:
        if name not in ENGINES:
            raise ConfigError(f"--engines: no row {name!r}; there are {', '.join(ENGINES)}")
        parse_engine(ENGINES[name])
    if min(args.rounds, args.steps, args.tokens) < 1 or args.delay_ms < 0:
        raise ConfigError("--rounds, --steps and --tokens begin at 1, --delay-ms at 0")
    try:
        rates = [float(word) for word in args.gbit.split(",")]
    except ValueError:
        raise ConfigError(f"--gbit: expected numbers with commas, found {args.gbit!r}") from None
    if not all(0.001 <= rate <= 400 for rate in rates):
        raise ConfigError(f"--gbit: expected rates from 0.001 to 400, found {args.gbit!r}")
    return layouts, [testbed.Profile(rate, args.delay_ms) for rate in rates], names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", default="2x1,2x2", help=f"hosts x ranks, of {', '.join(LAYOUTS)}")
    add("--gbit", default="10,1", help="rates of the cable, with commas")
    add("--delay-ms", type=float, default=0.0, help="of the cable; needs netem in the kernel")
    add("--engines", default=",".join(ENGINES), help=f"rows, of {', '.join(ENGINES)}")
    add("--workload", choices=tuple(WORKLOADS), default="23M")
    add("--tokens", type=int, default=32, help="per rank and step")
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=2, help="in a round")
    add("--limit-s", type=float, default=400.0, help="no round begins behind it, but the first")
    add("--quick", action="store_true", help="a tiny model, one round of one step")
    add("--json", metavar="PATH", help="write the last line there too")
    return parser


def _interrupt(number: int, frame: object) -> None:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
