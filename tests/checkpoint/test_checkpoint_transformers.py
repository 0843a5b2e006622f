"""Models of `transformers`: built on meta, sharded, loaded, and written so that it loads them.

All were also written and loaded again once by hand; here only some, for time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardwise as sw
from ranks import on_ranks
from shardwise.cli.checkpoint import main

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", _GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "BertForMaskedLM": ("BertConfig", _BASE),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", {**_GROUPED, "head_dim": 8}),
    "MistralForCausalLM": ("MistralConfig", _GROUPED),
    "PhiForCausalLM": ("PhiConfig", _BASE),
    "OlmoForCausalLM": ("OlmoConfig", {**_GROUPED, "pad_token_id": 0}),
    "GPTJForCausalLM": (
        "GPTJConfig",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", _BASE),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {**_GROUPED, "head_dim": 8}),
}
WRITTEN = ("LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel")


def build(name: str) -> Any:
    config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return build(name)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(12).reshape(2, 6)).logits


def again(name: str, directory: Path) -> torch.Tensor:
    """What `transformers` makes of a directory; its configuration is read there too."""
    return logits(getattr(transformers, name).from_pretrained(directory).eval())


@on_ranks(2, timeout_s=180)
def test_every_model_loads_on_meta_and_is_written_for_transformers(
    rank: int, tmp_path: Path
) -> None:
    for name in MODELS:
        plain = build(name)
        if rank == 0:
            plain.save_pretrained(tmp_path / name / "in")
        dist.barrier()
        expected = logits(plain)
        model = sw.shard_model(on_meta(name))
        sw.load_pretrained(model, tmp_path / name / "in")
        assert torch.equal(logits(model.eval()), expected), name
        if name not in WRITTEN:
            continue
        sw.save_pretrained(model, tmp_path / name / "out")
        sw.CheckpointManager(tmp_path / name / "ours").save(1, model)
        if rank == 0:
            assert torch.equal(again(name, tmp_path / name / "out"), expected), name
            paths = [str(tmp_path / name / d) for d in ("ours", "exported")]
            assert main(["export", *paths]) == 0
            assert torch.equal(again(name, Path(paths[1])), expected), name
            config = json.loads((tmp_path / name / "exported" / "config.json").read_text())
            assert config["architectures"] == [name]
        dist.barrier()


@on_ranks(2, timeout_s=120)
def test_materialize_fills_what_no_state_dict_has(rank: int) -> None:
    for name in ("LlamaForCausalLM", "BertForMaskedLM", "GPTJForCausalLM", "Gemma2ForCausalLM"):
        plain, model = build(name), on_meta(name)
        sw.materialize(sw.shard_model(model), seed=3)
        for key, buffer in plain.named_buffers():
            assert torch.equal(model.get_buffer(key), buffer), f"{name} {key}"
        state = {n: t.full_tensor() for n, t in model.state_dict().items()}
        plain.load_state_dict(state)
        torch.testing.assert_close(logits(model.eval()), logits(plain), rtol=1e-5, atol=1e-5)


class Losses(nn.Module):
    """What a training job puts around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("LlamaForCausalLM")

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=input_ids)


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


@on_ranks(2)
def test_a_wrapper_is_left_behind(rank: int, tmp_path: Path) -> None:
    model: Any = sw.shard_model(Losses())
    expected = logits(build("LlamaForCausalLM"))
    model.tokenizer = Tokenizer()
    sw.save_pretrained(model, tmp_path / "out")
    sw.CheckpointManager(tmp_path / "ours").save(1, model)
    if rank == 0:
        assert torch.equal(again("LlamaForCausalLM", tmp_path / "out"), expected)
        assert (tmp_path / "out" / "tokenizer.json").exists()
        main(["export", str(tmp_path / "ours"), str(tmp_path / "exported")])
        assert torch.equal(again("LlamaForCausalLM", tmp_path / "exported"), expected)
    with torch.device("meta"):
        other: Any = Losses()
    sw.load_pretrained(sw.shard_model(other), tmp_path / "out")  # and under its names again
    assert torch.equal(logits(other.eval()), expected)


def test_what_lies_beside_the_weights_goes_along(tmp_path: Path, capsys: Any) -> None:
    """From directory to directory, through a checkpoint of ours, to another dtype."""
    build("LlamaForCausalLM").save_pretrained(tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt", "modeling.py"):
        (tmp_path / "in" / name).write_text("{}")
    main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= written
    assert not {"notes.txt", "modeling.py"} & written
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"

    with torch.device("meta"):
        model = build("LlamaForCausalLM")
    sw.load_pretrained(model, tmp_path / "in")  # remembers where the tokenizer is
    sw.save_pretrained(model, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").exists()


def test_prefixes_are_stripped_on_request(tmp_path: Path, capsys: Any) -> None:
    torch.save({"a.b.weight": torch.ones(2), "c": torch.ones(1)}, tmp_path / "in.pt")
    words = ["export", str(tmp_path / "in.pt"), str(tmp_path / "out")]
    assert main([*words, "--strip-prefix", "a."]) == 0
    main(["ls", str(tmp_path / "out")])
    assert "model.b.weight" in capsys.readouterr().out
    assert main([*words[:2], str(tmp_path / "none"), "--strip-prefix", "x."]) == 2
    assert "no name begins with 'x.'" in capsys.readouterr().err


# -- models of one's own -------------------------------------------------------------------------
class Table(nn.Module):
    """A rotary table that only its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mask


class Filled(Table):
    def reset_parameters(self) -> None:
        self.mask.copy_(torch.ones(4, dtype=torch.bool))


class FilledByModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.mask.fill_(True)


class ForgottenByModel(FilledByModel):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)


@on_ranks(1)
def test_what_nobody_writes_is_named(rank: int, tmp_path: Path) -> None:
    for cls in (Filled, FilledByModel):
        with torch.device("meta"):
            models: list[Any] = [cls() for _ in range(3)]
        sw.materialize(sw.fully_shard(models[0]))
        sw.save_pretrained(models[0], tmp_path / cls.__name__)
        sw.load_pretrained(sw.fully_shard(models[1]), tmp_path / cls.__name__)
        sw.load_pretrained(models[2], tmp_path / cls.__name__)
        for model in models:
            assert all(b.all() for b in model.buffers())
    for cls, text in ((ForgottenByModel, "table.mask"), (Table, "mask on the meta")):
        with torch.device("meta"):
            model = sw.fully_shard(cls())
        with pytest.raises(RuntimeError, match=text):
            sw.materialize(model)
        with torch.device("meta"):
            plain = cls()
        path = tmp_path / ("FilledByModel" if cls is ForgottenByModel else "Filled")
        with pytest.raises(RuntimeError, match=text):
            sw.load_pretrained(plain, path)


def test_a_plain_model_keeps_ties_and_real_buffers(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    sw.save_pretrained(Tied(), tmp_path / "out")
    with torch.device("meta"):
        model = Tied()
    model.register_buffer("scale", torch.full((3,), 7.0), persistent=False)
    sw.load_pretrained(model, tmp_path / "out")
    assert model.head.weight is model.embed.weight
    assert model.scale.tolist() == [7.0] * 3
