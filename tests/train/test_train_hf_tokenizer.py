"""The tokenizer beside trained weights is the one that made the data, and can pad."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
pytest.importorskip("peft", reason="the extra 'hf' is not installed")
import torch
import transformers
from hf_kit import TEMPLATE, loaded, make_directory, make_tokenizer, run_hf_job

from ranks import run_ranks
from shardwise.cli.checkpoint import main as checkpoint_command
from shardwise.train.config_file import load_config
from shardwise.train.hf import generate
from shardwise.train.hf.tokenizer import beside_weights
from shardwise.train.model import build_model

PROMPTS = ["w3", "w5 w9 w11 w4 w60", "w7 w8"]


def without_pad(folder: Path) -> Any:
    make_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in said.items() if k != "pad_token"}))
    config = folder / "config.json"
    if config.exists():
        said = json.loads(config.read_text())
        config.write_text(json.dumps({**said, "pad_token_id": None}))
        (folder / "generation_config.json").unlink()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token is None
    return tokenizer


def train(rank: int, world: int, folder: Path, name: str, how: dict[str, Any]) -> None:
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    run_hf_job(folder / name, folder / "model", train__steps=1, **how)


def check_batch(model: Any, directory: Path) -> None:
    """A batch of prompts gives what each gives alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert (batch["input_ids"] == tokenizer.pad_token_id).any()
    made = model.generate(**batch, max_new_tokens=5, do_sample=False, eos_token_id=None)
    for prompt, row in zip(PROMPTS, made, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert torch.equal(alone[0, -5:], row[-5:]), prompt


def test_a_pad_token_is_made_where_there_is_none(tmp_path: Path) -> None:
    model_dir = make_directory("llama", tmp_path / "model")
    without_pad(model_dir)
    run_ranks(2, train, tmp_path, "whole", {}, timeout_s=240)
    run_ranks(2, train, tmp_path, "adapters", {"lora__rank": 2}, timeout_s=240)
    for run in ("whole", "adapters"):
        written = tmp_path / run / "model"
        tokenizer = transformers.AutoTokenizer.from_pretrained(written)
        assert (tokenizer.pad_token, tokenizer.padding_side) == ("<pad>", "left")
        assert tokenizer.chat_template == TEMPLATE
    merged = tmp_path / "merged"
    assert checkpoint_command(["merge", str(tmp_path / "adapters" / "model"), str(merged)]) == 0
    assert transformers.AutoTokenizer.from_pretrained(merged).pad_token == "<pad>"
    whole = tmp_path / "whole" / "model"
    model = loaded(whole)
    assert model.generation_config.pad_token_id == 0
    check_batch(model, whole)
    check_batch(loaded(merged), merged)


@pytest.mark.parametrize(
    ("renamed", "eos", "pad"), [("<none>", "</s>", "</s>"), ("[PAD]", "</s>", "[PAD]"),
                                ("<none>", None, "<none>")],
)  # fmt: skip
def test_which_token_it_is(tmp_path: Path, renamed: str, eos: str | None, pad: str) -> None:
    model_dir = make_directory("llama", tmp_path / "model")
    without_pad(model_dir)
    for file in (model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"):
        file.write_text(file.read_text().replace("<pad>", renamed))
    file = model_dir / "tokenizer_config.json"
    said = json.loads(file.read_text())
    said |= {"eos_token": eos} | ({} if eos else {"bos_token": None, "unk_token": None})
    file.write_text(json.dumps(said))
    values = {"model.kind": "hf", "model.path": str(model_dir)}
    config = load_config(
        None, [*values.items(), ("data.source", "x.npy"), ("data.seq_len", "32")]
    ).config
    kept, text = beside_weights(build_model(config, None), config)
    assert json.loads(kept["tokenizer_config.json"])["pad_token"] == pad
    assert f"no pad token; in what is exported {pad!r} is one" in text
    make_tokenizer(model_dir)  # with one: nothing is changed, nothing said
    kept, text = beside_weights(build_model(config, None), config)
    assert kept == {"tokenizer_from": str(model_dir)} and not text


def test_the_tokenizer_of_the_data_goes_along(tmp_path: Path) -> None:
    """With its own template; also to a model that had none beside it."""
    model_dir = make_directory("llama", tmp_path / "model")
    make_tokenizer(model_dir, TEMPLATE.replace("<user>", "w1"))
    other = tmp_path / "other"
    make_tokenizer(other, None)
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE.replace("<user>", "w2"))
    pairs = [{"instruction": f"w{i}", "output": f"w{i + 1} w{i + 2}"} for i in range(40)]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps(pairs))
    how = {"data__format": "instruction", "data__source": str(chats)}
    how |= {"data__tokenizer": str(other), "data__chat_template": str(template)}
    run_ranks(1, train, tmp_path, "run", how, timeout_s=240)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert written.chat_template == template.read_text()
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"] == 96
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        _, tokenizer = generate.load(path)
        assert tokenizer.chat_template == template.read_text()
