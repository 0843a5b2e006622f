"""Chats to packed rows to steps: the same numbers on any number of ranks, also after a resume on
another one, and each row once per epoch."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
from hf_kit import CONFIGS
from jobs import read_rows, results, run_job
from text_kit import chats, make_tokenizer, write_lines

import ranks
from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.text import check
from shardwise.train.text.samples import TextSamples

pytestmark = pytest.mark.timeout(600)  # each rank imports transformers and datasets
LIMIT_S = 250.0
BATCH = 8
JOB = {
    "model.kind": "hf",
    "data.format": "chat",
    "data.seq_len": 64,
    "data.held_out": 0.2,
    "train.steps": 5,
    "train.global_batch": BATCH,
    "train.micro_batch": 2,
    "train.eval_every": 3,
    "train.eval_samples": 4,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 0,
    "checkpoint.every": 0,
    "checkpoint.rehearsal": False,
    "log.every": 1000,
}


def on(world: int, *arguments: Any) -> list[Any]:
    """`run` on so many ranks."""
    return ranks.run_ranks(world, run, *arguments, timeout_s=LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its tokenizer, and chats."""
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, values = CONFIGS["llama"]
    config = getattr(transformers, name)(**values | {"vocab_size": 300})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    write_lines(tmp_path / "chats.jsonl", chats(40))
    return tmp_path


def keys(folder: Path) -> dict[str, Any]:
    return JOB | {"model.path": folder / "model", "data.source": folder / "chats.jsonl"}


def run(rank: int, world: int, folder: Path, name: str, changes: dict[str, Any]) -> None:
    """One rank of a job; it leaves which rows it has trained on."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    read: list[int] = []
    taken = TextSamples.batch

    def batch(self: TextSamples, indices: Any) -> Any:
        if len(indices) == 2 and len(self) > 10:  # a micro-batch of training
            read.extend(indices.tolist())
        return taken(self, indices)

    TextSamples.batch = batch  # type: ignore[method-assign]
    try:
        values = {key.replace(".", "__"): value for key, value in keys(folder).items()}
        run_job(folder / name, bare=True, **values | changes)
    finally:
        TextSamples.batch = taken  # type: ignore[method-assign]
    with (folder / f"{name}.{rank}.read").open("a") as file:
        file.write(json.dumps(read) + "\n")
    dist.barrier()


def rows_read(folder: Path, name: str) -> Counter[int]:
    texts = [
        text for file in folder.glob(f"{name}.*.read") for text in file.read_text().split("\n")
    ]
    return Counter(index for text in texts if text for index in json.loads(text))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_ranks(folder: Path, world: int) -> None:
    on(1, folder, "one", {})
    on(world, folder, "many", {})
    one, many = read_rows(folder / "one"), read_rows(folder / "many")
    # float32: sums over ranks are rounded in another order, and steps carry that on.
    assert many[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-6)
    for key in ("loss", "grad_norm", "val_loss"):
        found = [row[key] for row in many if key in row]
        assert found == pytest.approx([row[key] for row in one if key in row], rel=1e-5)
    assert sum("val_loss" in row for row in one) == 2


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_resume_on_other_ranks_goes_on_at_the_next_row(folder: Path, world: int) -> None:
    """Bit for bit under any_world, and no row is read twice or left out."""
    exact = {"run__reproducible": "any_world"}
    on(1, folder, "whole", exact)
    on(world, folder, "parts", exact | {"stop_after": 2})
    assert len(read_rows(folder / "parts")) == 2
    on(1, folder, "parts", exact | {"stop_after": 1})
    on(world, folder, "parts", exact)
    assert results(folder / "parts") == results(folder / "whole")

    values = [(key, str(value).lower()) for key, value in keys(folder).items()]
    number = len(open_data(load_config(None, values).config, None).train)
    assert 10 < number < 5 * BATCH
    whole = rows_read(folder, "whole")
    assert sum(whole.values()) == 5 * BATCH
    assert set(whole) == set(range(number))
    assert set(whole.values()) <= {5 * BATCH // number, 5 * BATCH // number + 1}
    assert rows_read(folder, "parts") == whole


def refused(rank: int, world: int, folder: Path) -> str:
    """A model that hears nothing of positions, in the whole job."""
    taken = check.arguments_of

    def deaf(model: Any, batch: Any) -> Any:
        args, kwargs = taken(model, batch)
        return args, {k: v for k, v in kwargs.items() if k != "position_ids"}

    check.arguments_of = deaf
    try:
        run(rank, world, folder, "run", {})
    except ConfigError as error:
        return str(error)
    finally:
        check.arguments_of = taken
    return ""


def test_a_job_whose_model_mixes_documents_does_not_start(folder: Path) -> None:
    first, second = ranks.run_ranks(2, refused, folder, timeout_s=LIMIT_S)
    assert "LlamaForCausalLM does not keep the documents of a row apart" in first
    assert first == second
    assert not (folder / "run").exists()
