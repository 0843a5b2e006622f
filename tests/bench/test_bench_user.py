"""A user's own model and batches: what is understood, and what mistakes are answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.bench.user import ConfigWorkload, UserWorkload, as_batch, checked_loss
from shardwise.errors import ConfigError

ROOT = Path(__file__).parents[2]
MODULE = """
import torch
from torch import nn
def model(): return nn.Linear(4, 4)
def with_options(options): return nn.Linear(4, 4 + len(options))
def on_meta():
    with torch.device("meta"):
        return nn.Linear(4, 4)
def frozen(): return nn.Linear(4, 4).requires_grad_(False)
def nothing(): return None
def raises(*args): raise KeyError("gone")
def batch(index): return (torch.randn(3, 4) + index,), {}, lambda out: out.square().mean()
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"bench_user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    return name


def test_model_and_batches_repeat_themselves(module):
    work = UserWorkload(f"{module}:model", f"{module}:batch")
    first, again = work.build(), work.build()
    assert torch.equal(first.weight, again.weight)
    mine, other = work.batches(0, 2), work.batches(1, 2)
    assert torch.equal(mine[1].args[0], work.batches(0, 2)[1].args[0])
    assert torch.equal(mine[0].args[0] + 0, work.batches(0, 1)[0].args[0]), "index 0 is index 0"
    assert torch.equal(other[0].args[0], work.batches(0, 1)[1].args[0]), "rank 1 begins at index 1"
    assert work.num_items(mine[0]) == 3
    assert mine[0].loss_of(first).requires_grad


def test_options_and_meta(module):
    assert UserWorkload(f"{module}:with_options", f"{module}:batch").build().out_features == 4
    model = UserWorkload(f"{module}:on_meta", f"{module}:batch").build()
    assert not model.weight.is_meta
    assert model.weight.abs().max() < 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", "must return an nn.Module, got NoneType"),
        ("frozen", "without trainable parameters"),
        ("raises", "raises raised KeyError: 'gone' ("),
        ("absent", "has no function 'absent'"),
    ],
)
def test_mistakes_of_a_model(module, name, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        UserWorkload(f"{module}:{name}", f"{module}:batch").build()


def test_mistakes_of_batches(module):
    with pytest.raises(ConfigError, match="raised KeyError"):
        UserWorkload(f"{module}:model", f"{module}:raises").batches(0, 2)
    with pytest.raises(ConfigError, match=r"expected module:function, found 'model\.py'"):
        UserWorkload("model.py", f"{module}:batch")
    with pytest.raises(ConfigError, match="third part must be a function, found int"):
        as_batch(((), {}, 3))
    with pytest.raises(ConfigError, match=r"a tensor of shape \[2\]"):
        checked_loss(torch.ones(2, requires_grad=True))


class _Out:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"loss": x}, _Out])
def test_what_a_model_may_return(wrap):
    class Model(nn.Module):
        def forward(self, x, scale=1.0):
            return wrap((x * scale).sum())

    x = torch.ones(2)
    assert as_batch(x).loss_of(Model()).item() == 2
    assert as_batch(((x,), {"scale": 3.0})).loss_of(Model()).item() == 6
    assert as_batch({"x": x, "scale": 3.0}).for_model(Model()).loss_of(Model()).item() == 6
    pair = (x, x)  # a tuple that is not (args, kwargs) is the only argument
    assert as_batch(pair).args == (pair,)


def test_a_configuration_names_model_and_data():
    work = ConfigWorkload.of(str(ROOT / "examples" / "convnet.toml"))
    model, batches = work.build(), work.batches(0, 2)
    assert work.items == "samples"
    assert work.num_items(batches[0]) == 32
    assert checked_loss(batches[0].loss_of(model)).item() > 0


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    code = re.search(r"<!-- file: mine.py -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    (tmp_path / "mine.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    work = UserWorkload("mine:model", "mine:batch")
    loss = work.batches(0, 2)[0].loss_of(work.build())
    assert checked_loss(loss).item() == pytest.approx(2.3, abs=0.5)
