"""Every optimizer of torch.optim by name: its keys, its numbers beside a plain loop, resumes,
groups that do not decay, schedules."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import results, run_job
from torch import nn

from ranks import on_ranks
from shardwise.errors import ConfigError
from shardwise.train.config import Config, OptimConfig, OwnOptimConfig, TrainConfig
from shardwise.train.config_file import config_as_toml, load_config
from shardwise.train.optimizer import build_optimizer
from shardwise.train.optimizer_keys import CHOSEN_BY_THE_JOB, OPTIMIZERS, REFUSED
from shardwise.train.schedule import learning_rate


def test_the_table_is_torch() -> None:
    """All optimizers are known or refused, with torch's keys and defaults."""
    found = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
        if cls is not torch.optim.Optimizer
    }
    assert {name.lower() for name in found} == OPTIMIZERS.keys() | REFUSED.keys()
    for torch_name, keys in OPTIMIZERS.values():
        signature = inspect.signature(found[torch_name]).parameters
        left_out = {"params", "lr", *CHOSEN_BY_THE_JOB}
        assert {k: p.default for k, p in signature.items() if k not in left_out} == keys


def load(**values: str) -> OptimConfig:
    return load_config(None, [(f"optim.{k}", v) for k, v in values.items()]).config.optim


def test_own_keys_and_defaults_are_those_of_the_kind(tmp_path: Path) -> None:
    sgd = load(kind="SGD", momentum="0.9", nesterov="true")
    assert isinstance(sgd, OwnOptimConfig)
    assert (sgd.kind, sgd.weight_decay) == ("sgd", 0.0)
    assert sgd.own == {"momentum": 0.9, "nesterov": True}
    assert load(kind="adam").betas == (0.9, 0.999)
    assert load(kind="adam", betas="0.8,0.9").betas == (0.8, 0.9)
    assert load() == OptimConfig()
    whole = load_config(None, [("optim.kind", "rprop"), ("optim.etas", "[0.4, 1.1]")]).config
    file = tmp_path / "config.toml"
    file.write_text(config_as_toml(whole))
    assert load_config(file).config == whole


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"kind": "adamv"}, "--optim.kind: 'adamv' is no optimizer of torch.optim that a job"),
        ({"kind": "adamv"}, "did you mean adam?"),
        ({"kind": "lbfgs"}, "lbfgs computes the loss several times a step (it needs a closure)"),
        ({"kind": "Muon", "state_dtype": "bfloat16"}, "--optim.state_dtype: muon needs whole"),
        ({"kind": "adafactor", "state_dtype": "bfloat16"}, "adafactor needs whole matrices"),
        ({"kind": "muon", "ns_steps": "0.5"}, "--optim.ns_steps: expected a whole number from 1"),
        ({"adamw": "head"}, "--optim.adamw: has no effect: optim.kind is 'adamw'"),
        ({"kind": "sgd", "momentun": "1"}, "--optim.momentun: unknown key for optim.kind = 'sgd'"),
        ({"kind": "sgd", "momentun": "1"}, "did you mean momentum?"),
        ({"momentum": "1"}, "--optim.momentum: belongs to optim.kind = muon or rmsprop or sgd, "),
        ({"fused": "true"}, "--optim.fused: is chosen by the job; leave it out"),
        ({"kind": "sgd", "momentum": "much"}, "--optim.momentum: expected a number, found 'much'"),
        ({"kind": "sgd", "nesterov": "1"}, "--optim.nesterov: expected true or false, found 1"),
        ({"kind": "rprop", "etas": "1"}, "--optim.etas: expected a list of 2 numbers, found 1"),
        ({"kind": "sgd", "betas": "0.9,0.9"}, "has no effect: optim.kind is 'sgd', which has none"),
        ({"kind": "rprop", "no_decay": "bias"}, "optim.kind is 'rprop', which has no weight decay"),
        ({"weight_decay": "0", "no_decay": "bias"}, "has no effect: optim.weight_decay is 0"),
        ({"decay_share": "0.5"}, "has no effect: optim.schedule is 'cosine'"),
        ({"schedule": "wsd", "decay_share": "1.5"}, "--optim.decay_share: 1.5 is above 1"),
    ],
)
def test_mistakes(values: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**values)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_that_the_optimizer_refuses_is_one_line() -> None:
    optim = load(kind="sgd", nesterov="true")
    with pytest.raises(ConfigError, match=r"optim.kind: sgd says: Nesterov momentum requires a"):
        build_optimizer(nn.Linear(2, 2), optim)


# -- groups --------------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 5)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.gate = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    ("rules", "spared"),
    [
        (("bias", "norm"), {"norm.weight", "norm.bias", "up.bias"}),
        (("bias",), {"norm.bias", "up.bias"}),
        (("norm", "embedding"), {"norm.weight", "table.weight"}),
        (("*.weight", "gate"), {"norm.weight", "table.weight", "up.weight", "gate"}),
        ((), set()),
    ],
)
def test_what_does_not_decay(rules: tuple[str, ...], spared: set[str]) -> None:
    model = Model()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, no_decay=rules))
    names = {id(p): name for name, p in model.named_parameters()}
    decays = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {name for name, decay in decays.items() if not decay} == spared
    assert decays.keys() == set(names.values()) and set(decays.values()) <= {0.1, 0.0}


def test_a_rule_that_means_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optim.no_decay: 'biases' is neither bias, norm nor"):
        build_optimizer(Model(), OptimConfig(no_decay=("biases",)))


@pytest.mark.parametrize(
    ("rules", "stepped"),
    [
        (("embedding", "head"), {"up.weight", "gate"}),
        (("embedding", "gate"), {"up.weight"}),
        ((), {"table.weight", "up.weight", "gate"}),
    ],
)
def test_what_muon_steps(rules: tuple[str, ...], stepped: set[str]) -> None:
    """Matrices of the layers; AdamW has the rest, and both have groups that do not decay."""
    model = Model()
    optimizer: Any = build_optimizer(
        model, OptimConfig(kind="muon", adamw=rules, no_decay=("up*",))
    )
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = (
        {names[id(p)] for g in one.param_groups for p in g["params"]}
        for one in optimizer.optimizers
    )
    assert muon == stepped and muon | adamw == set(names.values())
    decays = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {name for name, decay in decays.items() if not decay} == {"up.weight", "up.bias"}


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="muon has no matrix to step"):
        build_optimizer(nn.LayerNorm(3), OptimConfig(kind="muon"))


# -- schedules -----------------------------------------------------------------------------------
def rates(**optim: Any) -> list[float]:
    config = Config(train=TrainConfig(steps=20), optim=OptimConfig(lr=1.0, **optim))
    return [learning_rate(config, step) for step in range(1, 21)]


def test_linear() -> None:
    found = rates(schedule="linear", warmup_steps=10, final_lr_ratio=0.2)
    assert found[9] == 1.0 and found[14] == pytest.approx(0.6) and found[-1] == pytest.approx(0.2)


def test_wsd_is_constant_and_falls_at_the_end() -> None:
    found = rates(schedule="wsd", warmup_steps=2, final_lr_ratio=0.0, decay_share=0.25)
    assert found[1:15] == [1.0] * 14
    assert found[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    longer = Config(
        train=TrainConfig(steps=40),
        optim=OptimConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_share=0.25),
    )
    assert [learning_rate(longer, step) for step in range(1, 15)] == found[:14]


# -- in a job ------------------------------------------------------------------------------------
@on_ranks(2)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_sharded_step_is_the_plain_step_and_a_resume_no_interruption(rank, tmp_path, kind):
    """Losses of 4 steps beside 1 rank (`no_shard`), and of a run that stopped and went on."""
    options = {"optim__kind": kind, "train__steps": 4, "optim__lr": 1e-3}
    run_job(tmp_path / "whole", **options)
    run_job(tmp_path / "copies", shard__strategy="no_shard", **options)
    whole = [row[1] for row in results(tmp_path / "whole")]
    copies = [row[1] for row in results(tmp_path / "copies")]
    assert whole == pytest.approx(copies, rel=1e-5)  # fp32 sums in another order
    assert whole[-1] != whole[0]
    run_job(tmp_path / "parts", stop_after=2, **options)
    run_job(tmp_path / "parts", **options)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@on_ranks(2)
def test_another_optimizer_does_not_go_on_from_its_state(rank, tmp_path):
    run_job(tmp_path / "run", stop_after=1)
    with pytest.raises(ConfigError, match=r"state of optim.kind = 'adamw', which 'sgd' cannot"):
        run_job(tmp_path / "run", optim__kind="sgd")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "values",
    [
        {"kind": "adam"},
        {"kind": "adamw"},
        {"kind": "adagrad"},
        {"kind": "sgd"},
        {"kind": "sgd", "momentum": "0.9"},
        {"kind": "sgd", "momentum": "0.9", "nesterov": "true"},
    ],
    ids=lambda values: " ".join(values.values()),
)
def test_fused_kernels_are_those_of_the_plain_loop(
    values: dict[str, str], dtype: torch.dtype
) -> None:
    """On CPU, and up to their rounding: a few units in the last place. torch 2.13's SGD keeps
    another momentum for 16 bits (off by 4 times the gradients here), so the job does not take it.
    """
    config, ends = load(lr="0.1", **values), []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(16, 8, dtype=dtype)
        optimizer = build_optimizer(model, config, fused=fused)
        if not fused:
            for group in optimizer.param_groups:
                group["foreach"] = False
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        state = [v for s in optimizer.state.values() for v in s.values() if v is not None]
        ends.append([t.detach().float() for t in (*model.parameters(), *state)])
    for found, expected in zip(*ends, strict=True):
        scale = 1 + expected.abs().max()
        assert (found - expected).abs().max() <= 8 * torch.finfo(dtype).eps * scale
