"""Models of `transformers` from directory to directory: trained as plain PyTorch trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from hf_kit import (
    CONFIGS,
    JOB,
    config_of,
    loaded,
    logits_of,
    make_directory,
    make_tokens,
    new_model,
    run_hf_job,
)
from jobs import read_rows

from ranks import on_ranks, run_ranks
from shardwise.cli.checkpoint import main as checkpoint_command
from shardwise.doctor.command import main as verify_command
from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.model import build_model, model_notes
from shardwise.train.optimizer import build_optimizer
from shardwise.train.order import SampleOrder

FAST = ("llama_tied", "gemma2", "mixtral")


def plain_steps(model_dir: Path, tokens: Path, steps: int) -> tuple[Any, list[float]]:
    """The same job by hand: no shards, no ranks, the mean over the whole batch at once."""
    values = {**JOB, "model.path": str(model_dir), "data.source": str(tokens)}
    config = load_config(None, [(k, str(v).lower()) for k, v in values.items()]).config
    data, model, losses = open_data(config, None), loaded(model_dir), []
    order = SampleOrder(len(data.train), config.run.seed)
    optimizer = build_optimizer(model, config.optim)
    model.train()
    for step in range(steps):
        total = 0.0
        for part in range(2):  # micro-batches, as the router of a mixture of experts sees them
            ids = data.train.batch(order.indices(4 * step + 2 * part, 2))
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / 2
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model, losses


def train_save_resume_export(name: str, folder: Path) -> None:
    """Two steps at once, and one step, an end and another: equal runs, equal to plain ones."""
    model_dir = make_directory(name, folder / "model")
    run_hf_job(folder / "whole", model_dir)
    run_hf_job(folder / "parts", model_dir, stop_after=1)
    assert len(read_rows(folder / "parts")) == 1
    run_hf_job(folder / "parts", model_dir)
    losses = [row["loss"] for row in read_rows(folder / "whole")]
    assert [row["loss"] for row in read_rows(folder / "parts")] == losses, name
    if dist.get_rank() == 0:
        model, expected = plain_steps(model_dir, folder / "tokens.npy", 2)
        # float32: sums over micro-batches and ranks are rounded in another order than here.
        assert losses == pytest.approx(expected, rel=1e-5), name
        for run in ("whole", "parts"):
            exported = folder / f"{run}_exported"
            assert checkpoint_command(["export", str(folder / run), str(exported)]) == 0
            found = logits_of(loaded(exported))
            # AdamW's first steps have the size of lr whatever the gradient: what is rounded there
            # is magnified, least where gradients are near zero.
            torch.testing.assert_close(found, logits_of(model), rtol=2e-3, atol=2e-3)
        written = folder / "whole" / "model"
        assert torch.equal(logits_of(loaded(written)), found), name
        card = (written / "README.md").read_text()
        assert f"{losses[0]:.4f} at first, {losses[-1]:.4f} at the end" in card
        equal = [logits_of(loaded(folder / f"{run}_exported")) for run in ("whole", "parts")]
        assert torch.equal(*equal), name
        before = json.loads((model_dir / "config.json").read_text())
        assert json.loads((folder / "whole_exported" / "config.json").read_text()) == before
    dist.barrier()


@on_ranks(2, timeout_s=240)
def test_a_directory_is_trained_resumed_and_exported(rank: int, tmp_path: Path) -> None:
    for name in FAST:
        (tmp_path / name).mkdir(exist_ok=True)
        train_save_resume_export(name, tmp_path / name)


@pytest.mark.long
@on_ranks(2, timeout_s=600)
def test_every_model_of_the_table(rank: int, tmp_path: Path) -> None:
    for name in CONFIGS:
        if name not in FAST:
            (tmp_path / name).mkdir(exist_ok=True)
            train_save_resume_export(name, tmp_path / name)


def new_weights(rank: int, world: int, folder: Path) -> None:
    """A job from a configuration alone, whose one step changes nothing."""
    for name in NEW:
        home = folder / f"{name}_{world}"
        home.mkdir(exist_ok=True)
        if rank == 0:
            config_of(name).to_json_file(home / "config.json")
        dist.barrier()
        how = {"optim__lr": 1e-30, "train__steps": 1, "run__reproducible": "any_world"}
        run_hf_job(home / "run", home / "config.json", **how)


NEW = ("llama_tied", "gpt2", "mixtral")


def test_new_weights_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Bit for bit, and so is the loss on them."""
    for world in (1, 2):
        run_ranks(world, new_weights, tmp_path, timeout_s=240)
    for name in NEW:
        runs = [tmp_path / f"{name}_{world}" for world in (1, 2)]
        for home in runs:
            assert checkpoint_command(["export", str(home / "run"), str(home / "out")]) == 0
        one, two = (loaded(home / "out").state_dict() for home in runs)
        for key, tensor in one.items():
            assert torch.equal(tensor, two[key]), f"{name} {key}"
            is_drawn = key.endswith("weight") and tensor.ndim > 1
            assert not is_drawn or 0.008 < tensor.std() < 0.03, (
                f"{name} {key}"
            )  # 0.02, 0.01 in GPT-2's projections
        assert read_rows(runs[0] / "run")[0]["loss"] == read_rows(runs[1] / "run")[0]["loss"]


def other_dtypes(rank: int, world: int, folder: Path) -> None:
    for kept in ("auto", "bfloat16"):
        run_hf_job(folder / kept, folder / "model", model__dtype=kept, shard__param_dtype="bf16")


def test_other_dtypes(tmp_path: Path) -> None:
    """A bfloat16 directory is kept in float32, or as it is; what is written is what was kept."""
    new_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    run_ranks(2, other_dtypes, tmp_path, timeout_s=240)
    for kept, name in (("auto", "float32"), ("bfloat16", "bfloat16")):
        config = load_config(tmp_path / kept / "config.toml").config
        said = " ".join(model_notes(build_model(config, None), config))
        assert f"weights in bfloat16 there, kept in {name}, computed in bfloat16" in said
        assert "attention: sdpa (not flash_attention_2: it does not run on cpu)" in said
        out = tmp_path / f"{kept}_out"
        assert checkpoint_command(["export", str(tmp_path / kept), str(out)]) == 0
        assert json.loads((out / "config.json").read_text())["dtype"] == name
        assert loaded(out, "auto").dtype == getattr(torch, name)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 4])
def test_verify_takes_such_a_model(rank: int, tmp_path: Path) -> None:
    """Plain PyTorch, one rank, two and a resume agree to the last bit, with adapters too."""
    path = make_directory("llama_tied", tmp_path / "model")
    lines = {"model.kind": "hf", "model.path": path, "data.source": make_tokens(tmp_path)}
    lines |= {"data.seq_len": 16, "train.micro_batch": 1, "train.global_batch": 4}
    lines |= {"lora.rank": rank, "run.dir": tmp_path / "run"}
    text = ""
    for section in dict.fromkeys(key.partition(".")[0] for key in lines):
        text += f"[{section}]\n"
        for key, value in lines.items():
            if key.startswith(f"{section}."):
                shown = value if isinstance(value, int) else f'"{value}"'
                text += f"{key.partition('.')[2]} = {shown}\n"
    (tmp_path / "job.toml").write_text(text)
    words = ["--ranks", "1,2", "--strategies", "full_shard", "--transports", "shared_memory"]
    assert verify_command([str(tmp_path / "job.toml"), *words]) == 0
