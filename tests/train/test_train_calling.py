"""How a job calls a model, and what it takes for its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import read_rows, run_job, text_file
from torch import nn

from ranks import on_ranks
from shardwise.errors import ConfigError
from shardwise.train.calling import arguments_of, outputs_of

X, Y = torch.ones(2, 3), torch.zeros(2)


class OneBatch(nn.Module):
    def forward(self, batch: Any, **options: Any) -> Any:
        return {"loss": torch.ones(1), "given": len(batch), "hidden": torch.zeros(2, 2)}


class Keywords(nn.Module):
    def forward(self, x: Any = None, y: Any = None) -> Any:
        return None if y is None else x.sum() - y.sum()


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Pair(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x.sum() - y.sum()


class Causal(nn.Module):
    loss_type = "ForCausalLM"

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("model", "batch", "args", "keys"),
    [
        (OneBatch(), X, 1, []),
        (OneBatch(), {"x": X}, 1, []),
        (OneBatch(), [X, Y], 1, []),
        (Keywords(), {"y": Y, "x": X}, 0, ["y", "x"]),
        (Keywords(), X, 1, []),
        (Keywords(), (X, Y), 1, []),  # one argument is enough
        (Pair(), [X, Y], 2, []),
        (Anything(), {"x": X}, 0, ["x"]),
        (Causal(), X.long(), 0, ["input_ids", "labels"]),
        (Causal(), X, 1, []),
        (Causal(), {"input_ids": X, "more": Y}, 0, ["input_ids", "more"]),
    ],
)
def test_arguments(model: nn.Module, batch: Any, args: int, keys: list[str]) -> None:
    given, named = arguments_of(model, batch)
    assert (len(given), list(named)) == (args, keys)


def test_outputs() -> None:
    found = outputs_of(OneBatch(), {"x": X})
    assert {name: float(value) for name, value in found.items()} == {"loss": 1, "given": 1}
    assert outputs_of(Keywords(), {"x": X, "y": Y})["loss"] == 6


@pytest.mark.parametrize(
    ("model", "batch", "text"),
    [
        (Keywords(), {"x": X}, "Keywords must return its loss (one number)"),
        (
            Keywords(),
            {"x": X, "z": Y},
            "with the keys x, z: got an unexpected keyword argument 'z'",
        ),
        (Anything(), {"x": X}, "got tuple"),
        (Causal(), {"input_ids": X}, "got NoneType; its loss needs labels, which the batch lacks"),
    ],
)
def test_mistakes_are_one_line(model: nn.Module, batch: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        outputs_of(model, batch)
    assert text in str(caught.value) and "\n" not in str(caught.value)


JOB = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
def llama(options):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64))
def gpt2(options):
    return GPT2LMHeadModel(GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        tokens = torch.randint(256, (17,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
class Unlabelled(Sequences):
    def __getitem__(self, i):
        return {"input_ids": super().__getitem__(i)["input_ids"]}
def labelled(section):
    return Sequences(), Sequences()
def unlabelled(section):
    return Unlabelled(), None
"""
CONFIG = """
model.kind = "their_models:llama"
data = {{source = "{source}", seq_len = 32}}
train = {{steps = 2, global_batch = 64, micro_batch = 8}}
"""


@on_ranks(2)
def test_models_of_transformers_as_they_are(rank, tmp_path, monkeypatch):
    """Tokens of files and dicts of a dataset; the first loss is the plain model's."""
    pytest.importorskip("transformers")
    (tmp_path / "their_models.py").write_text(JOB)
    config = tmp_path / "job.toml"
    config.write_text(CONFIG.format(source=text_file(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    import their_models

    whole = torch.stack([their_models.Sequences()[i]["input_ids"] for i in range(64)])
    for kind in ("llama", "gpt2"):
        options = {"config_file": config, "model__kind": f"their_models:{kind}"}
        run_job(tmp_path / kind, **options)
        assert [row["step"] for row in read_rows(tmp_path / kind)] == [1, 2]
        run_job(tmp_path / f"{kind}2", data__source="their_models:labelled", **options)
        rows = read_rows(tmp_path / f"{kind}2")
        torch.manual_seed(0)
        model = getattr(their_models, kind)({})
        want = model(input_ids=whole, labels=whole).loss.item()
        assert "logits" not in rows[0]  # one epoch is one batch; sums in another order:
        assert rows[0]["loss"] == pytest.approx(want, rel=1e-5)
    with pytest.raises(ConfigError, match="its loss needs labels, which the batch lacks"):
        run_job(tmp_path / "none", data__source="their_models:unlabelled", **options)
