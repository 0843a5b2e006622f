"""What a run leaves for others: whole or absent, whatever kills it, and written in the end."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from hf_kit import loaded, make_directory, make_tokenizer, run_hf_job

from kills import killed_at_each_step
from ranks import run_ranks
from shardwise.checkpoint.importing import open_source
from shardwise.cli.main import main
from shardwise.train.hf.export import export, export_at_end


def run_once(rank: int, world: int, folder: Path, **options: object) -> str:
    """A run of two steps; what it says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run_hf_job(folder / "run", folder / "model", **options)
    return said.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_directory("llama", tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    run_ranks(1, run_once, tmp_path)
    return tmp_path


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("has_older", [False, True])
def test_a_kill_at_any_step_of_the_export(folder: Path, has_older: bool) -> None:
    """There is the whole new model, the whole old one, or none."""
    run = folder / "run"
    model, expected = run / "model", contents_of(run / "model")
    older = {"config.json": b"{}", "model.safetensors": b"of an earlier step"}

    def put_back() -> None:
        shutil.rmtree(model, ignore_errors=True)
        if has_older:
            model.mkdir()
            for name, content in older.items():
                (model / name).write_bytes(content)

    put_back()
    seen = []
    for _ in killed_at_each_step(lambda: export_at_end(run / "checkpoints", model), run):
        seen.append(contents_of(model) if model.exists() else None)
        assert seen[-1] in ([None, expected, older] if has_older else [None, expected])
        put_back()
    assert len(seen) > len(expected)
    assert contents_of(model) == expected
    assert sorted(p.name for p in run.iterdir() if p.name.startswith(".")) == []


def test_a_kill_at_any_step_of_the_command(folder: Path) -> None:
    def convert() -> None:
        source = open_source(folder / "run")
        export(source, folder / "mine/model")
        source.close()

    mine, expected = folder / "mine/model", contents_of(folder / "run/model")
    for _ in killed_at_each_step(convert, folder / "mine"):
        if mine.exists():
            assert contents_of(mine) == expected
            shutil.rmtree(mine)
    assert contents_of(mine) == expected
    assert [p.name for p in (folder / "mine").iterdir()] == ["model"]


@pytest.mark.parametrize("left", ["nothing", "one of an earlier step"])
def test_a_run_that_was_killed_in_its_export_ends_it(folder: Path, left: str) -> None:
    """The last step is saved by then, so that there is nothing left to train."""
    model = folder / "run/model"
    expected = contents_of(model)
    if left == "nothing":
        shutil.rmtree(model)
    else:
        (model / "model.safetensors").write_bytes(b"of an earlier step")
        os.utime(model, (1, 1))
    (said,) = run_ranks(1, run_once, folder)
    assert "is complete: step 2 of 2" in said
    assert f"the model is in {model}" in said
    assert contents_of(model) == expected
    loaded(model)
    (said,) = run_ranks(1, run_once, folder)
    assert "the model is in" not in said
    shutil.rmtree(model)
    run_ranks(1, run_once, folder, checkpoint__export=False)
    assert not model.exists()


@pytest.mark.parametrize("lora", [0, 2])
def test_a_tokenizer_that_is_gone_is_said(folder: Path, lora: int, capsys: Any) -> None:
    """With what to do; and that does it."""
    if lora:
        shutil.rmtree(folder / "run")
        run_ranks(1, run_once, folder, lora__rank=lora)
    moved = folder / "moved"
    (folder / "model").rename(moved)
    run, mine = str(folder / "run"), str(folder / "mine")
    assert main(["checkpoint", "export", run, mine]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"{mine} has no tokenizer: {folder / 'model'}, where it was, is not there any more" in said
    )
    assert "Copy its files" in said
    assert "--tokenizer DIR" in said
    shutil.rmtree(mine)
    assert main(["checkpoint", "export", run, mine, "--tokenizer", run]) == 2
    assert f"--tokenizer: {run} holds no tokenizer" in capsys.readouterr().err
    assert not Path(mine).exists()
    assert main(["checkpoint", "export", run, mine, "--tokenizer", str(moved)]) == 0
    assert capsys.readouterr().err == ""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (Path(mine) / name).read_bytes() == (moved / name).read_bytes()


def test_a_model_without_one_is_no_fault(tmp_path: Path, capsys: Any) -> None:
    make_directory("llama", tmp_path / "model")
    run_ranks(1, run_once, tmp_path)
    capsys.readouterr()
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().err == ""
    source = str(
        tmp_path / "model"
    )  # a directory that others wrote, and a tokenizer from elsewhere
    make_tokenizer(tmp_path / "other")
    arguments = ["export", source, str(tmp_path / "both"), "--tokenizer", str(tmp_path / "other")]
    assert main(["checkpoint", *arguments]) == 0
    assert (tmp_path / "both/tokenizer.json").exists()
