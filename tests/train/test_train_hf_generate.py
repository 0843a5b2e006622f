"""`shardwise generate`: the text that transformers itself would give, for all that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("peft", reason="the extra 'hf' is not installed")
import peft
from hf_kit import loaded, make_directory, make_tokenizer, run_hf_job

from ranks import run_ranks
from shardwise.train.hf.generate import main


def asked(capsys: Any, path: Path, prompt: str, *words: str) -> str:
    capsys.readouterr()
    options = ["--max-new-tokens", "6", "--json", "--device", "cpu", *words]
    assert main([str(path), "--prompt", prompt, *options]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return found["answer"]


def expected(model: Any, tokenizer: Any, text: str) -> str:
    given = tokenizer(text, return_tensors="pt")["input_ids"]
    made = model.generate(input_ids=given, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)


def train(rank: int, world: int, folder: Path, how: dict[str, Any]) -> None:
    run_hf_job(folder / f"run_{len(how)}", folder / "model", **how)


def test_directories_runs_and_adapters(tmp_path: Path, capsys: Any) -> None:
    model_dir = make_directory("llama", tmp_path / "model")
    tokenizer = make_tokenizer(model_dir)
    chat = "<user> w5 w9 </s> <assistant>"
    assert asked(capsys, model_dir, "w5 w9") == expected(loaded(model_dir), tokenizer, chat)
    plain = expected(loaded(model_dir), tokenizer, "w5 w9")
    assert asked(capsys, model_dir, "w5 w9", "--plain") == plain
    with_system = expected(loaded(model_dir), tokenizer, f"<system> w3 </s> {chat}")
    assert asked(capsys, model_dir, "w5 w9", "--system", "w3") == with_system
    drawn = [asked(capsys, model_dir, "w5", "--temperature", "2", "--seed", s) for s in "112"]
    assert drawn[0] == drawn[1] != drawn[2]

    run_ranks(2, train, tmp_path, {}, timeout_s=240)
    run = tmp_path / "run_0"
    trained = expected(loaded(run / "model"), tokenizer, chat)
    assert asked(capsys, run, "w5 w9") == asked(capsys, run / "model", "w5 w9") == trained
    assert asked(capsys, run / "checkpoints" / "step_00000002", "w5 w9") == trained

    run_ranks(2, train, tmp_path, {"lora__rank": 4}, timeout_s=240)
    run = tmp_path / "run_1"
    model = peft.PeftModel.from_pretrained(loaded(model_dir), run / "model")
    adapted = expected(model, tokenizer, chat)
    assert asked(capsys, run, "w5 w9") == asked(capsys, run / "model", "w5 w9") == adapted


def refused(capsys: Any, *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    return text


def test_mistakes_are_a_line(tmp_path: Path, capsys: Any) -> None:
    model_dir = str(make_directory("llama", tmp_path / "model"))
    assert "no such file" in refused(capsys, str(tmp_path / "nothing"), "--prompt", "x")
    assert "holds no config.json" in refused(capsys, str(tmp_path), "--prompt", "x")
    assert "has no tokenizer" in refused(capsys, model_dir, "--prompt", "x")
    assert "--prompt" in refused(capsys, model_dir)
    assert "did you mean --prompt" in refused(capsys, model_dir, "--prompt", "x", "--promt", "x")
    for value in ("-1", "warm", "nan"):
        assert "from 0 to 100" in refused(
            capsys, model_dir, "--prompt", "x", "--temperature", value
        )
    text = refused(capsys, model_dir, "--prompt", "x", "--max-new-tokens", "0")
    assert "expected a number of tokens" in text
    make_tokenizer(tmp_path / "model", template=None)
    assert "--prompt: is empty" in refused(capsys, model_dir, "--prompt", "")
    adapters = peft.get_peft_model(
        loaded(Path(model_dir)), peft.LoraConfig(target_modules=["q_proj"])
    )
    adapters.save_pretrained(tmp_path / "adapters")
    (tmp_path / "model").rename(tmp_path / "moved")
    text = refused(capsys, str(tmp_path / "adapters"), "--prompt", "x")
    assert "its base" in text
    assert "checkpoint merge" in text
    assert torch.get_default_dtype() == torch.float32
