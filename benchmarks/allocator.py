"""What a rank would reserve of a device's memory, by a model of the allocator: ours beside FSDP2.

    python benchmarks/allocator.py                     12 blocks, 50M, 185M and SmolLM2: 3 minutes
    python benchmarks/allocator.py --models 50M --precision bf16 --ranks 8 --json PATH
    python benchmarks/allocator.py --models 50M --at-peak     what is held then, and by whom alone

**Not validated on a device.** The trace of a step is recorded on the CPU of one process
(`memory_trace.py`), with streams that are names, and given to a model of torch's caching allocator
(`caching_allocator.py`); the same for both engines. `gpu_hour.py` measures beside it where there
is a GPU.

reserved     what the allocator would have taken from the driver, at the end: it gives nothing back
allocated    the most in blocks that somebody held, in the last step
padding      of what shardwise gathers, beyond the parameters
deferred     frees in the last step that wait for an event of another stream (`record_stream`)
growth       reserved at the end, less that at the end of the third step: 0 is expected
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from caching_allocator import MIB, CachingAllocator, EventsPass
from memory_trace import Recorder
from shardwise.bench.machine import describe
from shardwise.bench.workload import workload_named
from shardwise.engine.services.grouping import choose_units
from shardwise.train.columns import Column, console_of, print_columns
from traced_engines import ENGINES, padding, record

Built = tuple[nn.Module, list[nn.Module]]
NUM_STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.down(F.gelu(self.up(self.norm(x))))))


def twelve_blocks() -> Built:
    """0.45 M parameters each: gathered copies are below 10 MiB and share segments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), *(Block(300) for _ in range(12)))
    return model, list(model[1:])


def loss_of_blocks(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(64, 300)).square().mean()


def decoder(name: str) -> Callable[[], Built]:
    def build() -> Built:
        model = workload_named(name).build()
        return model, units_of(model)

    return build


def loss_of_decoder(name: str) -> Callable[[nn.Module], torch.Tensor]:
    workload = workload_named(name)
    tokens = torch.zeros(1, workload.num_tokens + 1, dtype=torch.int64)
    return lambda model: model(tokens)


def smollm2() -> Built:
    """The configuration of SmolLM2-135M, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()  # values do not matter, and NaN is slow
    return model, list(model.model.layers)


def loss_of_smollm2(model: Any) -> torch.Tensor:
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    return model(input_ids=tokens, labels=tokens).loss


def units_of(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for group in choose_units(model, "auto") for name in group]


MODELS: dict[str, tuple[Callable[[], Built], Callable[[nn.Module], torch.Tensor]]] = {
    "12 blocks": (twelve_blocks, loss_of_blocks),
    "50M": (decoder("50M"), loss_of_decoder("50M")),
    "185M": (decoder("185M"), loss_of_decoder("185M")),
    "SmolLM2": (smollm2, loss_of_smollm2),
}


def measure(engine: str, name: str, mesh: Any, precision: str, num_steps: int) -> dict[str, Any]:
    build, loss_of = MODELS[name]
    recorder = Recorder()
    model = record(engine, build, loss_of, mesh, precision, num_steps, recorder)
    padded, real = padding(model) if engine == "shardwise" else (0, 0)
    del model
    gc.collect()
    held = [[size, stream, num] for (size, stream), num in recorder.trace.at_peak().items()]
    found: dict[str, Any] = {"num_events": len(recorder.trace.events), "at_peak": held}
    for events in EventsPass:
        allocator = CachingAllocator(events)
        steps = recorder.trace.replay(allocator)
        last = steps[-1]
        found[events.replace(" ", "_")] = {
            "reserved_bytes": allocator.reserved_bytes,
            "reserved_by_stream": allocator.reserved_by(),
            "reserved_after_step": [step.reserved for step in steps],
            "allocated_peak_bytes": last.allocated_peak,
            "requested_peak_bytes": last.requested_peak,
            "fragmentation": round(1 - last.allocated_peak / allocator.reserved_bytes, 4),
            "deferred_frees": last.num_deferred,
            "growth_bytes": allocator.reserved_bytes - steps[min(2, len(steps) - 1)].reserved,
        }
    if engine == "shardwise":
        found |= {"padding_bytes": padded, "padding_share": round(padded / real, 5)}
    return found


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (args.ranks,))
    rows = []
    for name in args.models.split(","):
        for precision in args.precision.split(","):
            num_steps = args.steps or (50 if name == "12 blocks" else NUM_STEPS)
            row: dict[str, Any] = {"model": name, "precision": precision, "steps": num_steps}
            for engine in ENGINES:
                row[engine] = measure(engine, name, mesh, precision, num_steps)
            for what in ("reserved_bytes", "allocated_peak_bytes"):
                ours, theirs = (row[engine]["at_sync"][what] for engine in ENGINES)
                row[f"{what.removesuffix('_bytes')}_of_fsdp2"] = round(ours / theirs, 3)
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], num_ranks: int) -> None:
    cells = []
    for row in rows:
        for engine in ENGINES:
            found, at_sync = row[engine], row[engine]["at_sync"]
            is_ours = engine == "shardwise"
            cells.append(
                [
                    f"{row['model']}, {row['precision']}", engine,
                    f"{at_sync['reserved_bytes'] / MIB:,.0f}",
                    f"{row['reserved_of_fsdp2']:.2f}" if is_ours else "1",
                    f"{at_sync['allocated_peak_bytes'] / MIB:,.1f}",
                    f"{row['allocated_peak_of_fsdp2']:.2f}" if is_ours else "1",
                    f"{at_sync['fragmentation']:.0%}",
                    f"{found['padding_share']:.2%}" if is_ours else "",
                    f"{at_sync['deferred_frees']}",
                    f"{at_sync['growth_bytes'] / MIB:,.0f} in {row['steps']}",
                ]
            )  # fmt: skip
    names = (
        "model", "engine", "reserved MiB", "of FSDP2's", "allocated MiB", "of FSDP2's",
        "not allocated", "padding", "deferred", "growth MiB",
    )  # fmt: skip
    columns = zip(names, zip(*cells, strict=True), strict=True)
    print_columns(
        console_of(sys.stdout),
        f"rank 0 of {num_ranks}, by the model of the allocator; not validated on a device",
        [Column(n, list(c), is_number=i > 1) for i, (n, c) in enumerate(columns)],
    )


def show_peaks(row: dict[str, Any]) -> None:
    """What one engine holds at its peak and the other does not, the most first."""
    ours, theirs = (
        Counter({(size, stream): num for size, stream, num in row[engine]["at_peak"]})
        for engine in ENGINES
    )
    print(f"{row['model']}, {row['precision']}, at the peak")
    for engine, only in zip(ENGINES, (ours - theirs, theirs - ours), strict=True):
        largest = sorted(only.items(), key=lambda held: -held[0][0] * held[1])[:12]
        for (size, stream), num in largest:
            mib = f"{num} x {size / MIB:,.2f} = {num * size / MIB:,.1f} MiB"
            print(f"  {engine} alone: {mib}, {stream}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help="several with commas")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="default 50 for 12 blocks, else 4")
    parser.add_argument("--at-peak", action="store_true", help="what each holds at its peak")
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    args = parser.parse_args(argv)
    for name in args.models.split(","):
        if name not in MODELS:
            parser.error(f"--models: no model {name!r}; there are {', '.join(MODELS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.time()
    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    rows = measure_all(args)
    dist.destroy_process_group()
    show(rows, args.ranks)
    for row in rows if args.at_peak else ():
        show_peaks(row)
    result = {
        "benchmark": "allocator", "validated_on_a_device": False, **describe(),
        "ranks": args.ranks, "seconds": round(time.time() - began), "rows": rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
