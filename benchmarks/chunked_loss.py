"""Peak memory and time of a language model's loss: all logits at once, and a chunk at a time.

    python benchmarks/chunked_loss.py [--json FILE] [--tokens 512,4096] [--heads 576x49152,...]

One process, float32. Each way computes the loss of random hidden states and all gradients:

    plain         logits of all rows, float(), cross_entropy; what transformers does
    checkpointed  the naive chunks: autograd recomputes each and adds up its gradient of the head
    chunked       `train/loss/chunked.py`: gradients in the forward, one buffer

Peak live bytes are counted from the allocator's own events (torch.profiler), so memory inside of
kernels counts too; what was there before (hidden states, weight) does not. Times are the fastest of
the rounds, without the profiler. `auto` says what train.chunked_loss = "auto" chooses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from shardwise.bench.machine import describe
from shardwise.train.loss.causal import LossChoice
from shardwise.train.loss.chunked import linear_cross_entropy, rows_of_chunk

HEADS = "576x49152,1152x256000"  # SmolLM2 135M; the width and vocabulary of Gemma 3 1B

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def checkpointed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    parts = zip(hidden.split(rows(weight)), targets.split(rows(weight)), strict=True)
    losses = [checkpoint(plain, h, weight, t, use_reentrant=False) for h, t in parts]
    return torch.stack(losses).sum()


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, None, targets)


WAYS: dict[str, Way] = {"plain": plain, "checkpointed": checkpointed, "chunked": chunked}


def rows(weight: Tensor) -> int:
    return rows_of_chunk(weight.shape[1])


def peak_of(action: Callable[[], object]) -> int:
    """Most bytes that were live at a time, of those allocated since the call began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(way: Way, num_tokens: int, dim: int, vocab: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, dim, requires_grad=True)
    weight = (torch.randn(vocab, dim) * 0.02).requires_grad_()
    targets = torch.randint(vocab, (num_tokens,))

    def step() -> float:
        hidden.grad = weight.grad = None
        loss = way(hidden, weight, targets)
        loss.backward()
        return float(loss.detach()) / num_tokens

    peak, seconds, loss = peak_of(step), [], 0.0
    for _ in range(rounds):
        started = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - started)
    assert weight.grad is not None
    norm = float(weight.grad.double().norm())
    return {"peak_bytes": peak, "seconds": min(seconds), "loss": loss, "head_grad_norm": norm}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the result into this file")
    parser.add_argument("--tokens", default="512,4096")
    parser.add_argument("--heads", default=HEADS, help="widths x vocabularies")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", default=",".join(WAYS), help="plain is needed: the others' scale")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = []
    for head in options.heads.split(","):
        dim, vocab = map(int, head.split("x"))
        for num_tokens in map(int, options.tokens.split(",")):
            ways = {
                name: measure(WAYS[name], num_tokens, dim, vocab, options.rounds)
                for name in options.ways.split(",")
            }
            check(ways)
            row = {"tokens": num_tokens, "dim": dim, "vocab": vocab, **ways}
            row["auto"] = "on" if LossChoice("auto", dim).chunks(num_tokens) else "off"
            row["head_grad_bytes"] = 4 * dim * vocab
            for ratio, key in (("peak_ratio", "peak_bytes"), ("time_ratio", "seconds")):
                if "chunked" not in ways:
                    continue
                row[ratio] = round(ways["chunked"][key] / ways["plain"][key], 3)
            found.append(row)
            print(told(row), file=sys.stderr, flush=True)
    result = {"benchmark": "chunked_loss", **describe(), "rounds": options.rounds, "rows": found}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def check(ways: dict[str, dict[str, Any]]) -> None:
    """All ways have computed the same: a saving by leaving something out would be none."""
    for name, row in ways.items():
        for key in ("loss", "head_grad_norm"):
            want = ways["plain"][key]
            assert abs(row[key] - want) <= 1e-5 * abs(want), (name, key, row[key], want)


def told(row: dict[str, Any]) -> str:
    parts = [f"{row['tokens']} tokens, head {row['vocab']} x {row['dim']} (auto: {row['auto']}):"]
    for name in [name for name in WAYS if name in row]:
        peak, seconds = row[name]["peak_bytes"] / 2**20, row[name]["seconds"]
        parts.append(f"{name} {peak:,.0f} MiB {seconds:.2f} s")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
