"""`run.reproducible` in the job: metrics to the last bit on any number of ranks, and after a resume
on another; refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY, run_job

from ranks import run_ranks
from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.metrics import read_metrics

ANY: dict[str, Any] = {"run__reproducible": "any_world", "checkpoint__every": 0}
KEYS = ("step", "loss", "grad_norm", "val_loss")


def job(rank: int, world: int, directory: str, options: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    try:
        run_job(Path(directory), **options)
    finally:
        torch.set_num_threads(before)


def numbers(world: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a job on `world` ranks; floats in the file round-trip."""
    run_ranks(world, job, str(directory), options, timeout_s=120.0)
    rows = read_metrics(directory / "metrics.jsonl")
    return [{key: row[key] for key in KEYS if key in row} for row in rows]


def test_metrics_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    """6 micro-batches, on 1 to 4 ranks, bf16 and recomputation included."""
    expected = numbers(1, tmp_path / "one", **ANY)
    assert [row["step"] for row in expected if "val_loss" in row] == [4, 8]
    assert numbers(2, tmp_path / "two", **ANY, shard__strategy="no_shard") == expected
    assert numbers(3, tmp_path / "three", **ANY, shard__transport="c10d") == expected
    hybrid = numbers(4, tmp_path / "four", **ANY, mesh__replicate=2)
    assert hybrid == expected
    usual = numbers(3, tmp_path / "usual", checkpoint__every=0)
    assert usual != expected and usual[0]["loss"] == pytest.approx(expected[0]["loss"])


def test_metrics_in_bf16(tmp_path: Path) -> None:
    options = {**ANY, "shard__param_dtype": "bfloat16", "shard__activation_checkpointing": "full"}
    expected = numbers(1, tmp_path / "one", **options)
    assert numbers(3, tmp_path / "three", **options) == expected


def test_a_resume_on_other_ranks_is_no_interruption(tmp_path: Path) -> None:
    expected = numbers(1, tmp_path / "whole", **ANY)
    parts = tmp_path / "parts"
    run_ranks(2, job, str(parts), {**ANY, "stop_after": 3}, timeout_s=120.0)
    run_ranks(4, job, str(parts), {**ANY, "stop_after": 2}, timeout_s=120.0)
    assert numbers(1, parts, **ANY) == expected


def test_same_world_repeats(tmp_path: Path) -> None:
    options = {"run__reproducible": "same_world", "checkpoint__every": 4}
    expected = numbers(2, tmp_path / "a", **options)
    parts = tmp_path / "b"
    run_ranks(2, job, str(parts), {**options, "stop_after": 3}, timeout_s=120.0)
    assert numbers(2, parts, **options) == expected


def refused(rank: int, world: int, directory: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(rank, world, directory, options)


def test_a_resume_that_breaks_the_promise_is_refused(tmp_path: Path) -> None:
    same = {"run__reproducible": "same_world", "train__steps": 2}
    run_ranks(2, job, str(tmp_path / "same"), same)
    run_ranks(
        1,
        refused,
        str(tmp_path / "same"),
        {**same, "train__steps": 4},
        "same_world cannot give the numbers of an uninterrupted run: ranks 2 -> 1",
    )
    run_ranks(1, job, str(tmp_path / "off"), {"train__steps": 2})
    changed = {**ANY, "train__steps": 4, "run__threads": 2}
    text = "threads 1 -> 2; run.reproducible off -> any_world"
    run_ranks(1, refused, str(tmp_path / "off"), changed, text)


def test_what_breaks_the_promise_is_refused(tmp_path: Path) -> None:
    def load(**overrides: str) -> None:
        values = {"run.reproducible": "any_world", **overrides}
        load_config(None, list(values.items()))

    load(**{"train.global_batch": "48", "train.micro_batch": "16"})
    with pytest.raises(ConfigError, match="bfloat16 sums"):
        load(**{"shard.reduce_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="is not a multiple of"):
        load(**{"train.global_batch": "50", "train.micro_batch": "16"})
    with pytest.raises(ConfigError, match="everywhere"):
        load(**{"run.reproducible": "everywhere"})


# -- data ----------------------------------------------------------------------------------------
DRAWN = """
import os
import torch
from torch import nn

class Samples:
    "Noisy pairs; `how` says where the noise comes from."
    def __init__(self, how):
        self.how, self.own = how, torch.Generator().manual_seed(0)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.full((4,), float(index)) / 48
        if self.how == "by_rank":
            return x + float(os.environ["RANK_OF_TEST"]), x.sum()
        return x + torch.rand(4, generator=self.own if self.how == "by_read" else None), x.sum()

def datasets(section):
    how = os.environ["HOW_OF_TEST"]
    return Samples(how), Samples(how)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 13), nn.Linear(13, 1)

    def forward(self, batch):
        x, y = batch
        return (self.down(self.up(x)).squeeze(1) - y).square().mean()

def build(options):
    return Model()
"""


def drawn_job(rank: int, world: int, directory: str, how: str, options: dict[str, Any]) -> None:
    folder = Path(directory).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOW_OF_TEST", how)
        patch.setenv("RANK_OF_TEST", str(rank))
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "drawn", raising=False)
        own = {"model__kind": "drawn:build", "data__source": "drawn:datasets"}
        options = {"config_file": folder / "drawn.toml", **own, **ANY, **options}
        job(rank, world, directory, options)


def refused_data(rank: int, world: int, directory: str, how: str, text: str, level: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drawn_job(rank, world, directory, how, {"run__reproducible": level})
    assert not Path(directory).exists()  # before the first write


def write_drawn(folder: Path) -> None:
    (folder / "drawn.py").write_text(DRAWN)
    train = {k.removeprefix("train."): v for k, v in TINY.items() if k.startswith("train.")}
    lines = "\n".join(f"{key} = {value}" for key, value in train.items())
    (folder / "drawn.toml").write_text(f"[train]\n{lines}\n")


def test_samples_that_draw_from_the_streams(tmp_path: Path) -> None:
    """Augmentation, of the evaluation's samples too: the same on any number of ranks."""
    write_drawn(tmp_path)
    rows = []
    for world in (1, 3):
        directory = tmp_path / str(world)
        run_ranks(world, drawn_job, str(directory), "by_stream", {}, timeout_s=120.0)
        found = read_metrics(directory / "metrics.jsonl")
        rows.append([{key: row[key] for key in KEYS if key in row} for row in found])
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0] if "val_loss" in row] == [4, 8]


@pytest.mark.parametrize("level", ["same_world", "any_world"])
def test_samples_that_differ_are_refused(tmp_path: Path, level: str) -> None:
    write_drawn(tmp_path)
    again = r"data.source: sample \d+ is another one when it is read again"
    run_ranks(1, refused_data, str(tmp_path / "run"), "by_read", again, level)
    elsewhere = r"data.source: sample \d+ is another one on rank 1"
    run_ranks(2, refused_data, str(tmp_path / "run"), "by_rank", elsewhere, level)
