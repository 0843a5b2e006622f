"""The loss and gradient of a step are the mean over all trained tokens, whatever the ranks,
micro-batches, strategy, accumulation, and way to compute the loss; so is an evaluation's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_reproducible import job

from ranks import run_ranks
from shardwise.train.metrics import read_metrics

pytest.importorskip("transformers")

# Samples with 0 to 30 trained tokens; one micro-batch has none at all. `counted`: they know it.
MODULE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def build(options):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=options.get("tied", False), attention_dropout=options.get("drop", 0.0)))

class Chats(torch.utils.data.Dataset):
    def __init__(self, first):
        self.first = first
    def __len__(self):
        return 24
    def __getitem__(self, i):
        i += self.first
        tokens = torch.randint(300, (31,), generator=torch.Generator().manual_seed(i))
        labels = tokens.clone()
        labels[: (31 if i % 6 < 2 else 7 * (i % 5) + 1)] = -100
        return {"input_ids": tokens, "labels": labels}

def chats(section):
    return Chats(0), Chats(100)
"""
CONFIG = """
model.kind = "chats_of_test:build"
data.source = "chats_of_test:chats"
train = {steps = 2, global_batch = 12, micro_batch = 2, grad_clip = 0.0, eval_samples = 10}
optim = {warmup_steps = 0}
checkpoint = {every = 0}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chats_of_test.py").write_text(MODULE)
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path


def rows(world: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
    options["config_file"] = directory.parent / "job.toml"
    run_ranks(world, job, str(directory), options, timeout_s=120.0)
    found = read_metrics(directory / "metrics.jsonl")
    keys = ("loss", "grad_norm", "val_loss")
    return [{key: row[key] for key in keys if key in row} for row in found]


def by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of the first step, from all samples at once, by transformers' own loss; and of an evaluation
    of the model that was not trained yet."""
    monkeypatch.syspath_prepend(str(folder))
    import chats_of_test

    from shardwise.train.evaluation import chosen_samples
    from shardwise.train.order import SampleOrder

    torch.manual_seed(0)
    model = chats_of_test.build({})
    train, held_out = chats_of_test.chats({})

    def loss_of(samples: Any, indices: Any) -> torch.Tensor:
        batch = [samples[int(i)] for i in indices]
        return model(**torch.utils.data.default_collate(batch), use_cache=False).loss

    loss = loss_of(train, SampleOrder(24, 0).indices(0, 12))
    loss.backward()
    squares = [p.grad.double().square().sum() for p in model.parameters()]
    with torch.no_grad():
        held = loss_of(held_out, chosen_samples(24, 10))
    return {"loss": loss.item(), "grad_norm": float(sum(squares)) ** 0.5, "val_loss": held.item()}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {}),
        (2, {"train__chunked_loss": "on"}),
        (2, {"shard__strategy": "no_shard", "train__chunked_loss": "on"}),
        (2, {"shard__unit": ("LlamaDecoderLayer", "Linear"), "train__chunked_loss": "on"}),
        (2, {"optim__in_backward": True}),
        (3, {"train__chunked_loss": "off"}),
        (4, {"mesh__replicate": 2, "train__micro_batch": 3}),
        (4, {"run__reproducible": "any_world", "train__chunked_loss": "on"}),
    ],
)
def test_the_first_step_is_the_mean_over_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world: int, options: dict[str, Any]
) -> None:
    want = by_hand(folder, monkeypatch)
    if "shard__unit" in options:
        options = {**options, "shard__unit": "LlamaDecoderLayer,lm_head"}
    # A learning rate of nearly nothing: the evaluation sees the first weights.
    found = rows(world, folder / "run", train__steps=1, optim__lr=1e-12, **options)[0]
    if options.get("optim__in_backward"):
        want.pop("grad_norm")
    # fp32 sums of 100 tokens in another order
    assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_any_world_has_the_same_bits(folder: Path, mode: str) -> None:
    options = {"run__reproducible": "any_world", "train__chunked_loss": mode}
    expected = rows(1, folder / "one", **options)
    assert len(expected) == 2 and "val_loss" in expected[-1]
    for world in (2, 3, 4):
        assert rows(world, folder / str(world), **options) == expected


class Counted:
    """Tells its tokens without being read, as text does; what it tells is what counts."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.read = 0

    def __len__(self) -> int:
        return 4

    def batch(self, indices: Any) -> dict[str, torch.Tensor]:
        self.read += 1
        return {"labels": torch.zeros(len(indices), 5, dtype=torch.long)}

    def trained_tokens(self, indices: Any) -> int:
        return 4 * len(indices) * self.factor


def test_samples_that_know_their_tokens_are_not_read_for_them() -> None:
    import numpy as np
    from torch import nn

    from shardwise.checkpoint.ranks import Ranks
    from shardwise.train.loss.weights import weigh_in_tree, weigh_on_ranks
    from shardwise.train.tensor_axis import DataRanks

    model: Any = nn.Identity()
    model.loss_type = "ForCausalLM"
    parts, samples = [np.arange(2), np.arange(2, 4)], Counted(2)
    weigh = weigh_in_tree(model, samples, parts, Ranks(), 0, 1)
    assert samples.read == 0
    assert weigh(samples.batch(parts[0])) == 8 * 2 / 32
    _, weigh = weigh_on_ranks(model, samples, parts, np.arange(4), Ranks(), DataRanks(0, 1, 1))
    assert weigh(samples.batch(parts[0])) == 8 / 32
