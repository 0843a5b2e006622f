"""Accelerate's FSDP2 plugin under `install()`: prepare, accumulate, clip, save, load.

Compared with the same program over torch's `fully_shard` (see trainers_kit.py), and with a plain
model that sees the data of both ranks: its loss is one mean over all rows, the others' the mean of
two ranks' means, hence 1e-5 relative.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainers_kit import (
    ENGINES,
    TOLERANCE,
    accelerate_shards,
    full,
    llama,
    mean_over_ranks,
    same_numbers,
    samples,
    sharded_by,
    using,
    whole,
)

from ranks import on_ranks

pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")
pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

STEPS, ACCUMULATION, ROWS, MAX_NORM = 4, 2, 2, 0.5


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def options_of(kind: str) -> dict[str, Any]:
    """With sharded state dicts also what else `accelerate config` proposes."""
    return {"state_dict_type": kind, "cpu_ram_efficient_loading": kind == "SHARDED_STATE_DICT"}


def prepared(engine: str, model: Any, **options: Any) -> tuple[Any, ...]:
    """What a script of Accelerate gets from `prepare`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
    assert accelerator.is_fsdp2
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2 * STEPS)
    rows = samples(2 * ROWS * ACCUMULATION * STEPS)
    loader = torch.utils.data.DataLoader(rows, batch_size=ROWS)  # type: ignore[arg-type]
    things = accelerator.prepare(model, optimizer, loader, schedule)
    # a unit for each layer, the embeddings, the tail, and the root
    assert len(sharded_by(things[0], engine)) >= 4
    return accelerator, *things


def train(accelerator: Any, things: Any, at: range) -> tuple[list[float], list[float]]:
    """Mean losses of micro-batches, and norms of steps."""
    model, optimizer, loader, schedule = things
    losses, norms = [], []
    for index, batch in enumerate(loader):
        if index // ACCUMULATION not in at:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(mean_over_ranks(loss))
            if accelerator.sync_gradients:
                norms.append(full(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses, norms


def plain_run() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same steps without any engine, on the rows of both ranks."""
    model = llama()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2 * STEPS)
    rows, losses, norms = samples(2 * ROWS * ACCUMULATION * STEPS), [], []
    for micro in range(STEPS * ACCUMULATION):
        some = rows[2 * ROWS * micro : 2 * ROWS * (micro + 1)]
        batch = {k: torch.stack([row[k] for row in some]) for k in ("input_ids", "labels")}
        loss = model(**batch).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if micro % ACCUMULATION == ACCUMULATION - 1:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            for _ in range(dist.get_world_size()):  # Accelerate steps schedules once per rank
                schedule.step()
            optimizer.zero_grad()
    return losses, norms, whole(model)


def program(engine: str, folder: Path, kind: str) -> list[Any]:
    """Train, save in the middle, load into another model, and train to the same end."""
    from accelerate.utils import extract_model_from_parallel  # noqa: F401 - imported before install

    half, results = STEPS // 2, []
    with using(engine), accelerate_shards():
        accelerator, *things = prepared(engine, llama(), **options_of(kind))
        losses, norms = train(accelerator, things, range(half))
        accelerator.save_state(str(folder / "state"))
        more_losses, more_norms = train(accelerator, things, range(half, STEPS))
        weights = whole(things[0])
        accelerator.save_model(things[0], str(folder / "model"))
        results += [losses + more_losses, norms + more_norms, weights]
    with using(engine), accelerate_shards():
        accelerator, *things = prepared(engine, llama(seed=1), **options_of(kind))
        accelerator.load_state(str(folder / "state"))
        again = train(accelerator, things, range(half, STEPS))
        same_numbers(again[0], more_losses)
        same_numbers(again[1], more_norms)
        same_numbers(whole(things[0]), weights)
    return results


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_ranks(2, timeout_s=300.0)
def test_train_clip_accumulate_save_and_load(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torchs, ours = [program(engine, tmp_path / engine, kind) for engine in ENGINES]
    same_numbers(ours[0], torchs[0], tolerance=TOLERANCE)
    same_numbers(ours[1], torchs[1], tolerance=TOLERANCE)
    same_numbers(ours[2], torchs[2], tolerance=TOLERANCE)
    assert min(ours[1]) > MAX_NORM  # it did clip
    for got, want in zip(ours, plain_run(), strict=True):
        same_numbers(got, want, tolerance=1e-4)
    saved = load_file(tmp_path / "ours/model/model.safetensors")
    same_numbers({n: saved[n] for n in ours[2]}, ours[2])
