"""Directories that cannot be trained: each is one line that names the place and what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
from hf_kit import JOB, config_of, make_directory, make_tokens, run_hf_job
from safetensors.torch import load_file, save_file

from ranks import on_ranks
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.hf.trial import check_forward
from shardwise.train.model import build_model, fill

SHARDED = {"max_shard_size": "20KB"}


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        said = json.loads((path / "config.json").read_text())
        said.update(values)
        (path / "config.json").write_text(json.dumps(said))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    return apply


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


NORM = "model.norm.weight"


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def quantize(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e5m2)
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "adapters": (
        lambda p: (p / "config.json").rename(p / "adapter_config.json"),
        "name the directory of the model they belong to",
    ),
    "broken JSON": (
        lambda p: (p / "config.json").write_text('{"model_type": "llama",'),
        "not valid JSON: .* line 1 column 24",
    ),
    "no JSON object": (lambda p: (p / "config.json").write_text("[]"), "names no model_type"),
    "no text": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe"), "not text in UTF-8"),
    "unknown type": (change_config(model_type="no_such"), "knows no model_type 'no_such'"),
    "remote code": (
        change_config(model_type="own", auto_map={"AutoModelForCausalLM": "modeling.Own"}),
        "trust_remote_code is off",
    ),
    "not causal": (
        change_config(architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification is not a causal language model",
    ),
    "encoder and decoder": (change_config(model_type="t5", architectures=None), "'t5' is not a"),
    "encoder": (
        change_config(model_type="bert", architectures=["BertLMHeadModel"]),
        "is an encoder",
    ),
    "values": (change_config(hidden_size="wide"), "transformers does not take it: .*hidden_size"),
    "quantized": (
        change_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        r"is quantized \(bitsandbytes\); write it as bfloat16 first",
    ),
    "no weights": (no_weights, r"has no weights .*config.json itself: .*/config.json"),
    "truncated": (truncate, "model.safetensors: truncated or damaged"),
    "no safetensors": (
        lambda p: (p / "model.safetensors").write_bytes(b"x" * 100),
        "no safetensors file, or truncated",
    ),
    "missing tensor": (
        change_weights(lambda t: t.pop("model.norm.weight")),
        "missing from the directory: model.norm.weight",
    ),
    "surplus tensor": (
        change_weights(lambda t: t.update(extra=torch.ones(2))),
        "unknown to the model: extra",
    ),
    "reshaped tensor": (
        change_weights(reshape),
        r"of another shape: model.norm.weight \(31,\) -> \(32,\)",
    ),
    "whole numbers": (
        change_weights(lambda t: t.update({NORM: t[NORM].to(torch.int8)})),
        "model.norm.weight is stored as int8, quantized: without its scales",
    ),
    "fp8": (
        change_weights(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
        "model.norm.weight is stored as float8_e4m3fn, quantized: without its scales",
    ),
    "fp8 beside scales": (
        change_weights(quantize),
        "q_proj.weight is stored as float8_e5m2, quantized",
    ),
    "fp8 that is said": (
        change_config(quantization_config={"quant_method": "fp8"}),
        r"is quantized \(fp8\); write it as bfloat16 first",
    ),
    "dropout above 1": (change_config(attention_dropout=2.0), "attention_dropout is 2.0, which is"),
    "dropout below 0": (change_config(attention_dropout=-0.5), "write one from 0 to 1"),
    "dropout nan": (change_config(attention_dropout=float("nan")), "attention_dropout is nan"),
    "dropout inside": (change_config(text_config={"hidden_pdrop": 3}), "hidden_pdrop is 3, which"),
    "layers": (
        change_config(num_hidden_layers=10**9),
        "num_hidden_layers is 1,000,000,000; at most 4,096 are built: is it a slip",
    ),
    "tables": (
        change_config(head_dim=10**15),
        "cannot be built: .*allocate memory",
    ),
    "unknown activation": (change_config(hidden_act="boom"), "cannot be built: it knows no 'boom'"),
    "other sizes": (change_config(vocab_size=97), r"of another shape: lm_head.weight \(96, 32\)"),
    "attention": (change_config(), "model.attention: flash_attention_2: it does not run on cpu"),
    "too long": (change_config(max_position_embeddings=16), "data.seq_len: 24 is more than the 16"),
    "vocabulary": (
        change_config(),
        "data.source: holds token 95, but the model knows tokens below 90",
    ),
}
SHARDED_CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (
        lambda p: next(iter(sorted(p.glob("model-*.safetensors")))).unlink(),
        "model-00001-of-.*: No such file",
    ),
    "broken index": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        "weight_map",
    ),
    "file elsewhere": (
        lambda p: (p / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.norm.weight": "../model.safetensors"}}'
        ),
        "is no file beside it",
    ),
}


def refused(path: Path, **overrides: str) -> str:
    """The text with which a job on that model is refused."""
    tokens = str(make_tokens(path.parent))
    values = {**JOB, "model.path": str(path), "data.source": tokens, "run.device": "cpu"}
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_config(None, [(k, str(v).lower()) for k, v in values.items()]).config
    with pytest.raises(ConfigError) as caught:
        build_model(config, None)
        data = open_data(config, None)
        data.train.batch(torch.arange(len(data.train)).numpy())
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    assert str(path.parent) in text or text.startswith(("model.attention", "data."))
    return text


@pytest.mark.parametrize("case", CASES)
def test_a_directory_that_cannot_be_trained(case: str, tmp_path: Path) -> None:
    change, expected = CASES[case]
    path = make_directory("llama", tmp_path / "model")
    if case == "vocabulary":
        config = config_of("llama")
        config.vocab_size = 90
        config.to_json_file(tmp_path / "small.json")
        path = tmp_path / "small.json"
    else:
        change(path)
    how = {"model__attention": "flash_attention_2"} if case == "attention" else {}
    text = refused(path, **how)
    assert re.search(expected, text), text


@pytest.mark.parametrize("case", SHARDED_CASES)
def test_a_sharded_directory_that_is_damaged(case: str, tmp_path: Path) -> None:
    change, expected = SHARDED_CASES[case]
    path = make_directory("llama", tmp_path / "model", **SHARDED)
    change(path)
    text = refused(path)
    assert re.search(expected, text), text


def test_bytes_are_no_tokens_of_a_model(tmp_path: Path) -> None:
    """Text would train without a word, on other words than it has."""
    path = make_directory("llama", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("some text " * 2000)
    said = refused(path, data__source=str(text))
    assert "bytes are no tokens of the model; set data.format = 'text'" in said
    config = config_of("llama")
    config.vocab_size = 256
    config.to_json_file(tmp_path / "bytes.json")  # a new model may learn bytes
    values = {**JOB, "model.path": str(tmp_path / "bytes.json"), "data.source": str(text)}
    loaded = load_config(None, [(k, str(v).lower()) for k, v in values.items()])
    assert open_data(loaded.config, None).unit == "byte"


def test_learned_places_hold_one_token_more(tmp_path: Path) -> None:
    path = make_directory("gpt2", tmp_path / "model")
    text = refused(path, data__seq_len="64")
    assert "one token more than 64" in text
    assert "use at most 63" in text
    values = {**JOB, "model.path": str(path), "data.seq_len": "63", "run.device": "cpu"}
    build_model(load_config(None, [(k, str(v).lower()) for k, v in values.items()]).config, None)


def test_what_is_not_there(tmp_path: Path) -> None:
    text = refused(tmp_path / "nothing")
    assert "no such directory or configuration file" in text
    assert "hf download" not in text
    config = load_config(None, [("model.kind", "hf"), ("model.path", "org/name")]).config
    with pytest.raises(ConfigError, match="hf download org/name --local-dir org/name"):
        build_model(config, None)
    with pytest.raises(ConfigError, match=r"model\.path: is empty"):
        load_config(None, [("model.kind", "hf")])
    with pytest.raises(ConfigError, match=r"model\.dim: belongs to model.kind = 'decoder'"):
        load_config(None, [("model.kind", "hf"), ("model.path", "x"), ("model.dim", "3")])


@on_ranks(2)
def test_weights_that_are_tied_in_the_model_alone(rank: int, tmp_path: Path) -> None:
    """Which of the two is meant nobody can know; the line says what to do."""
    path = make_directory("llama", tmp_path / "model")
    if rank == 0:
        change_config(tie_word_embeddings=True)(path)
    dist.barrier()
    with pytest.raises(ConfigError) as caught:
        run_hf_job(tmp_path / "run", path)
    text = str(caught.value)
    assert "\n" not in text
    assert "two in the directory: " in text
    assert "Untie them in the model (tie_word_embeddings: false in the config.json" in text
    assert not (tmp_path / "run").exists()


@on_ranks(2)
def test_what_only_a_forward_refuses(rank: int, tmp_path: Path) -> None:
    """Values that nobody looks at before: found by a forward, before anything is written."""
    path = make_directory("mixtral", tmp_path / "model")
    if rank == 0:
        change_config(num_experts_per_tok=9)(path)
    dist.barrier()
    with pytest.raises(ConfigError) as caught:
        run_hf_job(tmp_path / "run", path)
    text = str(caught.value)
    assert "\n" not in text
    assert "the model's own forward fails on the first sample: RuntimeError" in text
    assert re.search(
        r"\(modeling_mixtral\.py, line \d+\); look at the values of .*config\.json", text
    )
    assert not (tmp_path / "run").exists()


def test_the_first_forward_leaves_no_trace(tmp_path: Path) -> None:
    """Dropout draws in it; the run draws what it would have drawn."""
    path = make_directory("llama", tmp_path / "model")
    change_config(attention_dropout=0.5)(path)
    values = {**JOB, "model.path": path, "data.source": make_tokens(tmp_path), "run.device": "cpu"}
    config = load_config(None, [(k, str(v).lower()) for k, v in values.items()]).config
    model = build_model(config, None).eval()
    fill(model, config, torch.device("cpu"))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check_forward(open_data(config, None), model, Ranks(), torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.long
def test_the_command_says_it_in_a_line_and_writes_nothing(tmp_path: Path) -> None:
    path = make_directory("llama", tmp_path / "model")
    truncate(path)
    tokens = make_tokens(tmp_path)
    words = [sys.executable, "-m", "shardwise.cli", "train", "--nproc", "2", "--model.kind", "hf"]
    words += ["--model.path", str(path), "--data.source", str(tokens), "--data.seq_len", "24"]
    words += ["--run.dir", str(tmp_path / "run"), "--run.device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "truncated" in done.stderr
    assert not (tmp_path / "run").exists()
