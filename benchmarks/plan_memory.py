"""Are the bytes that a plan promises the bytes that a step holds?

    python benchmarks/plan_memory.py [--json FILE] [--only NAME]

12 jobs on two ranks (CPU, Gloo): the built-in decoder, a small Llama of transformers, and a model
with the sizes of SmolLM2-135M (random weights). Each is planned, then sharded and trained for two
steps. In the second a dispatch mode counts by storage what is live at every operator; what the
engine made is left out and read from it: registered shards, gathered copies, `.grad`, the
optimizer's state. What a rank receives is counted from the engine's events. All of it is compared
kind by kind: exact for what the engine owns and for bytes received, activations with logits never
below what was counted and at most 5% above. PSS at its peak stands beside them: libraries, the
store and what an operator takes inside are in it. Exit code 1 where a promise does not hold. The
last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from shardwise import clip_grad_norm_
from shardwise.bench.machine import describe
from shardwise.bench.memory import PssSampler
from shardwise.bench.traffic import count_ours
from shardwise.comm.c10d.packed_grads import PackedGrads
from shardwise.comm.transport import Transport
from shardwise.engine.core.gradients import BucketGrads
from shardwise.engine.core.reduction import Reduction
from shardwise.engine.core.state import units_in
from shardwise.engine.core.unit import Unit
from shardwise.engine.services.inspect import gathered_bytes
from shardwise.plan.live import Held, Live
from shardwise.plan.walk import received_bytes
from shardwise.train.calling import outputs_of
from shardwise.train.config import Config
from shardwise.train.config_file import load_config
from shardwise.train.model import build_model, fill, plan_of, shard
from shardwise.train.optimizer import build_optimizer
from shardwise.train.planned import Traces, step_of, vocab_size_of

RANKS, MOST_ABOVE = 2, 0.05
OWNED = ("parameters", "gathered", "gradients", "optimizer")
_DECODER = {"model.dim": 256, "model.layers": 6, "model.vocab_size": 4096, "train.micro_batch": 4}
_LLAMA = {"model.kind": "hf", "model.path": "llama", "train.micro_batch": 4, "data.seq_len": 128}
_SMOLLM2 = {
    "model.kind": "hf", "model.path": "smollm2", "train.micro_batch": 1, "data.seq_len": 256,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "decoder": _DECODER,
    "decoder, shard_grad_op": _DECODER | {"shard.strategy": "shard_grad_op"},
    "decoder, no_shard": _DECODER | {"shard.strategy": "no_shard"},
    "decoder, full recomputation, bf16": _DECODER
    | {"shard.activation_checkpointing": "full", "shard.param_dtype": "bfloat16"},
    "decoder, selective, 2 micro-batches": _DECODER
    | {"shard.activation_checkpointing": "selective", "train.global_batch": 16},
    "decoder, state in host memory": _DECODER | {"offload.optimizer": "cpu"},
    "llama": _LLAMA | {"train.chunked_loss": "off"},
    "llama, chunked loss, shard_optimizer": _LLAMA
    | {"train.chunked_loss": "on", "shard.strategy": "shard_optimizer"},
    "llama, LoRA": _LLAMA | {"lora.rank": 8},
    "smollm2-135m": _SMOLLM2,
    "smollm2-135m, full recomputation": _SMOLLM2 | {"shard.activation_checkpointing": "full"},
    "smollm2-135m, bf16, all logits": _SMOLLM2
    | {"train.chunked_loss": "off", "shard.param_dtype": "bfloat16"},
}


def config_of(job: dict[str, Any], folder: Path) -> Config:
    values = {"shard.transport": "c10d", **job}
    values.setdefault("train.global_batch", RANKS * values["train.micro_batch"])
    if "model.path" in values:
        values["model.path"] = str(_model(values["model.path"], folder, bool(job.get("lora.rank"))))
    return load_config(None, [(k, str(v)) for k, v in values.items()]).on(RANKS).config


def _model(name: str, folder: Path, has_weights: bool) -> Path:
    """A config.json, for a LoRA with weights beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "llama": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
                  "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
                  "max_position_embeddings": 512},
        "smollm2": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                    "max_position_embeddings": 8192, "tie_word_embeddings": True},
    }[name]  # fmt: skip
    path = folder / f"{name}{'_weights' if has_weights else ''}"
    path.mkdir(exist_ok=True)
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    if not has_weights:
        config.to_json_file(path / "config.json")
        return path / "config.json"
    if not (path / "model.safetensors").exists():
        LlamaForCausalLM(config).save_pretrained(path)
    return path


# -- counting --------------------------------------------------------------------------------------
_ENGINE = (
    (BucketGrads, ("_new_out", "take", "accumulate")),
    (PackedGrads, ("put", "finish")),
    (Reduction, ("finish", "start_all_reduce")),
    (Unit, ("unshard",)),
    (Transport, ("agree",)),
)


class Count(Live):
    """What a sharded model's step holds; storages that the engine makes are read from it."""

    def __init__(self, model: nn.Module, optimizer: Any, vocab_size: int | None) -> None:
        super().__init__(vocab_size)
        self._model, self._optimizer, self._in_engine = model, optimizer, 0
        self.most = dict.fromkeys((*OWNED, "activations", "logits", "both"), 0)

    def size_of_new(self, tensor: Tensor, storage: torch.UntypedStorage) -> Held:
        return Held() if self._in_engine else super().size_of_new(tensor, storage)

    def _know(self, storage: torch.UntypedStorage, size: Held) -> None:
        super()._know(storage, size)
        most, now = self.most, self.now
        most["activations"] = max(most["activations"], now.activations)
        most["logits"] = max(most["logits"], now.logits)
        most["both"] = max(most["both"], now.total)
        most["gathered"] = max(most["gathered"], gathered_bytes(self._model))

    @contextlib.contextmanager
    def engine_apart(self) -> Iterator[None]:
        def apart(function: Any) -> Any:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                self._in_engine += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._in_engine -= 1

            return run

        with contextlib.ExitStack() as stack:
            for cls, names in _ENGINE:
                for name in names:
                    patch = mock.patch.object(cls, name, apart(getattr(cls, name)))
                    stack.enter_context(patch)
            yield

    def at_end_of_backward(self) -> None:
        buckets = [b for u in units_in(self._model) for b in u.buckets]
        self.most["parameters"] = sum(b.registered.buffer.nbytes for b in buckets)
        self.most["parameters"] += sum(b.bucket.buffer.nbytes for b in buckets if b.home)
        grads = (p.grad for p in self._model.parameters() if p.grad is not None)
        self.most["gradients"] = sum(_local(g).nbytes for g in grads)

    def at_end_of_step(self) -> None:
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        kept = [v for state in inner.state.values() for k, v in state.items() if k != "step"]
        if not kept:  # offloaded
            kept = [v for s in self._optimizer.state.values() for k, v in s.items() if k != "step"]
        self.most["optimizer"] = sum(_local(v).nbytes for v in kept if isinstance(v, Tensor))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def measure(rank: int, job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Planned and counted bytes of one rank. Collective."""
    config = config_of(job, Path(folder))
    model = build_model(config, None)
    plan = plan_of(model, config, RANKS, on_accelerator=False)
    planned = step_of(plan, config, RANKS, Traces(model))
    vocab_size = vocab_size_of(model)
    shard(model, config, torch.device("cpu"), RANKS)
    fill(model, config, torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim, whole=config)
    micro, length = config.train.micro_batch, config.data.seq_len
    num_micro = config.train.global_batch // (micro * RANKS)
    model.train()

    def backward() -> None:
        for _ in range(num_micro):
            batch = torch.randint(0, vocab_size or 2, (micro, length + 1))
            outputs_of(model, batch)["loss"].backward()

    def step(count: Count | None) -> None:
        optimizer.zero_grad()
        backward()
        if count is not None:
            count.at_end_of_backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step(None)
    count = Count(model, optimizer, vocab_size)
    count.pass_over(b for b in model.buffers())
    with count.engine_apart(), count:
        step(count)
    count.at_end_of_step()
    optimizer.zero_grad()
    received = count_ours(model, backward).total_bytes
    walk = planned.walk
    return {
        "planned": {
            **{kind: walk.most[kind] for kind in (*OWNED, "activations", "logits")},
            "both": planned.trace.live_bytes,
            "received": received_bytes(plan, walk.events),
        },
        "counted": count.most | {"received": received},
        "peak": walk.peak.total, "moment": walk.peak.moment, "unit": walk.peak.unit,
        "is_known": planned.is_known,
    }  # fmt: skip


def rank_main(rank: int, job: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    found = measure(rank, job, folder)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# -- judging ---------------------------------------------------------------------------------------
def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan, and of what was counted the most of any rank."""
    counted = {kind: max(found["counted"][kind] for found in ranks) for kind in ranks[0]["counted"]}
    return ranks[0] | {"counted": counted}


def wrong(row: dict[str, Any]) -> list[str]:
    """Which promises do not hold."""
    planned, counted = row["planned"], row["counted"]
    found = [k for k in (*OWNED, "received") if planned[k] != counted[k]]
    share = planned["both"] / counted["both"] - 1
    return found + (["activations"] if not 0 <= share <= MOST_ABOVE else [])


def run_job(name: str, folder: str) -> dict[str, Any]:
    Path(folder, "store").unlink(missing_ok=True)
    config_of(JOBS[name], Path(folder))  # files that both ranks read
    ranks = mp.start_processes(rank_main, (JOBS[name], folder), RANKS, join=False)
    assert ranks is not None
    with PssSampler([int(pid) for pid in ranks.pids()]) as sampler:
        while not ranks.join():
            pass
    rows = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    pss = max(one.total for one in sampler.peak_of.values())
    return {"job": name, **joined(rows), "pss": pss}


def _text(row: dict[str, Any]) -> str:
    cells = []
    for kind in (*OWNED, "both", "received"):
        planned, counted = row["planned"][kind], row["counted"][kind]
        said = f"{planned:,}" if planned == counted else f"{planned:,} / {counted:,}"
        cells.append(f"{kind} {said}")
    share = row["planned"]["both"] / row["counted"]["both"] - 1
    said = "; ".join([*cells, f"({share:+.2%})"])
    where = f"{row['moment']} of {row['unit']}"
    return f"{row['job']}: {said}; peak {row['peak']:,} in the {where}; PSS {row['pss']:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for name in JOBS:
            if options.only in name:
                rows.append(run_job(name, folder))
                failed |= bool(wrong(rows[-1]))
                print(_text(rows[-1]), *wrong(rows[-1]), flush=True)
    result = {"benchmark": "plan_memory", **describe(), "ranks": RANKS, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
