"""What the plan's simulator says of runs that others have published, and by how much it is off.

    python benchmarks/plan_published.py [--json FILE]

Fitted, one share of the peak each: torchtitan's Llama 3.1 8B on 8 x H100, eager and compiled, and
with float8 and compile on 32 x H200. Predicted with these: the same model on 128 x H100 and 64 x
H200; and what full offload keeps of the throughput at 16K and 32K tokens, from what it keeps at 8K
(prime-rl). Collectives on H100 are by torchtitan's profile of 8 of them.

Sources: torchtitan (docs/benchmarks, performance tables of Llama 3.1 8B: local batch 2, sequence of
8,192, selective activation recomputation); prime-rl (offload of optimizer and gradients, 8 x H200,
Qwen3-30B-A3B). torchtitan's "selective" keeps every second matrix product and recomputes the other:
half a forward. Causal attention counts half of its products.

Fitted points say nothing of the simulator. Aim: predicted points within 15%. Exit code 1 if one is
not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.bench.machine import describe
from shardwise.plan.count import plan_count
from shardwise.plan.hardware import DEVICES
from shardwise.plan.links import H100_TIMES, Links
from shardwise.plan.speed import Speed, Work, step_time
from shardwise.train.columns import Column, console_of, print_columns

# Llama 3.1 8B, from its config.json.
DIM, LAYERS, HIDDEN, VOCAB, KV = 4096, 32, 14336, 128256, 1024
SEQUENCE, BATCH, RECOMPUTES = 8192, 2, 0.5
LAYER = DIM * (2 * DIM + 2 * KV) + 3 * DIM * HIDDEN
NUM_PARAMS = LAYERS * LAYER + 2 * VOCAB * DIM
AIM = 0.15


@dataclass(frozen=True)
class Run:
    """One published figure; `mode` has one share of the peak."""

    device: str
    count: int
    mode: str
    tokens_s: float  # for each device
    dtype: str = "bfloat16"


FITTED = (
    Run("h100", 8, "eager", 5762),
    Run("h100", 8, "compiled", 6667),
    Run("h200", 32, "float8, compiled", 10938, "float8"),
)
PREDICTED = (
    Run("h100", 128, "eager", 5605),
    Run("h100", 128, "compiled", 6514),
    Run("h200", 64, "float8, compiled", 10753, "float8"),
)
OFFLOAD = {8192: 0.44, 16384: 0.90, 32768: 1.0}  # tokens: throughput kept


def tokens_per_second(run: Run, efficiency: float) -> float:
    """Of one device."""
    device, tokens = DEVICES[run.device], SEQUENCE * BATCH
    units = LAYERS + 1  # embedding and head are those of the root
    plan = plan_count(NUM_PARAMS, strategy="full_shard", world=run.count, num_units=units)
    attention = 2 * 2 * SEQUENCE * DIM / 2
    layer = tokens * (2 * LAYER + attention)
    head = tokens * 2 * VOCAB * DIM
    work = Work([layer] * LAYERS + [head], recomputes=RECOMPUTES)
    links = Links(device.link, device.network, 8, table=H100_TIMES)
    speed = Speed(device, links, run.dtype, efficiency)
    return tokens / step_time(plan, work, speed).step_s


def fit(run: Run) -> float:
    """The share of the peak at which a run comes out, by bisection: more is never slower."""
    low, high = 0.01, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if tokens_per_second(run, middle) < run.tokens_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def kept(tokens: int, from_tokens: int, kept_there: float) -> float:
    """What offload keeps: a step takes as long as the longer one of computing, which grows with the
    tokens, and of moving and stepping the state, which does not.
    """
    moving = 1.0 / kept_there  # in units of the computation at `from_tokens`
    computing = tokens / from_tokens
    return computing / max(computing, moving)


def rows() -> list[dict[str, Any]]:
    shares = {run.mode: fit(run) for run in FITTED}
    found = []
    for is_fitted, runs in ((True, FITTED), (False, PREDICTED)):
        for run in runs:
            own = tokens_per_second(run, shares[run.mode])
            what = f"Llama 3.1 8B, {run.count} x {run.device.upper()}, {run.mode}"
            found.append({
                "what": what, "fitted": is_fitted, "published": run.tokens_s, "ours": own,
                "residual": own / run.tokens_s - 1, "share": shares[run.mode],
            })  # fmt: skip
    for tokens, published in OFFLOAD.items():
        own = kept(tokens, 8192, OFFLOAD[8192])
        found.append({
            "what": f"offload, {tokens:,} tokens, throughput kept", "fitted": tokens == 8192,
            "published": published, "ours": own, "residual": own / published - 1,
        })  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    args = parser.parse_args(argv)
    found = rows()
    columns = [
        Column("run", [r["what"] for r in found], is_number=False),
        Column("published", [f"{r['published']:,.4g}" for r in found]),
        Column("ours", [f"{r['ours']:,.4g}" for r in found]),
        Column("off", ["fitted" if r["fitted"] else f"{r['residual']:+.1%}" for r in found]),
    ]
    print_columns(console_of(sys.stdout), "tokens/s of a device", columns)
    for run in FITTED:
        share = next(r["share"] for r in found if r.get("share") and run.mode in r["what"])
        print(f"share of the peak, {run.mode}: {share:.3f}")
    result = {"benchmark": "plan_published", **describe(), "rows": found}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(abs(r["residual"]) > AIM for r in found if not r["fitted"]))


if __name__ == "__main__":
    raise SystemExit(main())
