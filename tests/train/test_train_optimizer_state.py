"""`optim.state_dtype = "bfloat16"`: steps beside a plain loop with such state, resumes on other
ranks, what it costs, and who takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import results, run_job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks, run_ranks
from shardwise._torch_compat import DispatchMode
from shardwise.errors import ConfigError
from shardwise.train.config import OptimConfig, own_keys
from shardwise.train.config_file import load_config
from shardwise.train.optimizer import build_optimizer
from shardwise.train.optimizer_keys import OF_WHOLES, OPTIMIZERS, num_states
from shardwise.train.optimizer_state import bring_to_dtype, initial_state

KEYS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"momentum": 0.9},
    "adagrad": {"initial_accumulator_value": 0.5},
}
# Measured with torch 2.13.0 on a CPU: the others interpolate (`lerp_`), which wants equal dtypes.
ELEMENT_WISE = OPTIMIZERS.keys() - set(OF_WHOLES)  # those of wholes keep state as torch makes it
TAKE_IT = ["adadelta", "adagrad", "asgd", "rmsprop", "rprop", "sgd"]


def load(kind: str, dtype: str = "bf16", **more: Any) -> OptimConfig:
    keys = {"kind": kind, "lr": 0.01, "state_dtype": dtype, **KEYS.get(kind, {}), **more}
    values = [(f"optim.{k}", str(v).lower()) for k, v in keys.items()]
    return load_config(None, values).config.optim


def slots(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """State of a parameter's shape, as this rank has it."""
    found = [
        value
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and parameter.ndim and value.shape == parameter.shape
    ]
    return [v.to_local() if isinstance(v, DTensor) else v for v in found]


@pytest.mark.parametrize("kind", sorted(ELEMENT_WISE))
def test_the_initial_state_is_torchs(kind: str) -> None:
    """With it three steps are those of an optimizer that makes its own; and it is counted right."""
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    other.load_state_dict(model.state_dict())
    plain, given = (build_optimizer(m, load(kind, "param")) for m in (model, other))
    for step in range(3):
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if not step:
            for group in given.param_groups:
                for parameter in group["params"]:
                    given.state[parameter] = initial_state(given, group, parameter)
        plain.step()
        given.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    optim = load(kind, "param")
    assert len(slots(plain)) == 2 * num_states(kind, own_keys(optim))


class Watch(DispatchMode):
    """The most elements of a float32 tensor that is made like another: so state is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.name() in ("aten::zeros_like", "aten::full_like") and made.dtype == torch.float32:
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("kind", TAKE_IT)
def test_nothing_of_it_is_ever_float32(kind: str) -> None:
    found = []
    for dtype in ("param", "bf16"):
        model = nn.Linear(64, 64)
        model(torch.randn(2, 64)).sum().backward()
        with Watch() as seen:
            optimizer = build_optimizer(model, load(kind, dtype))
            optimizer.step()
        found.append(seen.largest)
    if kind != "sgd":  # which keeps its first gradient
        assert found[0] == 64 * 64
    assert found[1] <= 3
    assert {slot.dtype for slot in slots(optimizer)} == {torch.bfloat16}


def test_who_does_not_take_it_is_named_with_those_who_do() -> None:
    for kind in ELEMENT_WISE - set(TAKE_IT):
        with pytest.raises(ConfigError) as caught:
            build_optimizer(nn.Linear(2, 2), load(kind))
        text = str(caught.value)
        start = f"optim.state_dtype: optim.kind = {kind!r} takes no bfloat16 state beside float32 "
        assert text.startswith(f"{start}parameters on cpu (torch: ") and "\n" not in text
        assert text.endswith(f"; leave it out, or use one that does: {', '.join(TAKE_IT)}")
    for more in ({"kind": "rmsprop", "centered": True}, {"kind": "sgd", "dampening": 0.5}):
        with pytest.raises(ConfigError, match=r"takes no bfloat16 state"):
            build_optimizer(nn.Linear(2, 2), load(**more))
    with pytest.raises(ConfigError, match=r"optim.kind: adagrad says: Invalid epsilon"):
        build_optimizer(nn.Linear(2, 2), load("adagrad", eps=-1))
    with pytest.raises(ConfigError, match=r"state_dtype: has no effect: optim.momentum is 0"):
        load("sgd", momentum=0)


def test_parameters_in_bfloat16_take_it_everywhere() -> None:
    for kind in ELEMENT_WISE:
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer = build_optimizer(model, load(kind))
        optimizer.step()
        assert {slot.dtype for slot in slots(optimizer)} == {torch.bfloat16}, kind


class Fixed(nn.Module):
    """The gradient of its loss is `pull`, on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, pull: Tensor) -> Tensor:
        return (self.weight * pull).sum()


def by_hand(kind: str, weight: Tensor, grads: list[Tensor]) -> Tensor:
    """Torch's optimizer on a plain parameter, with the state written down here."""
    parameter = nn.Parameter(weight.clone())
    cls = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    keys: Any = KEYS[kind]
    optimizer = cls[kind]([parameter], lr=0.01, foreach=True, **keys)
    zeros = torch.zeros(weight.shape, dtype=torch.bfloat16)
    step = torch.tensor(0.0)
    optimizer.state[parameter] = {
        "sgd": {"momentum_buffer": zeros},
        "adagrad": {"step": step, "sum": zeros + 0.5},
        "rmsprop": {"step": step, "square_avg": zeros, "momentum_buffer": zeros.clone()},
    }[kind]
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rmsprop"])
def test_a_step_is_that_of_a_plain_loop(rank: int, kind: str) -> None:
    model = Fixed()
    start = model.weight.detach().clone()
    sw.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = build_optimizer(model, load(kind))
    torch.manual_seed(5)
    grads = [torch.randn(7, 5) for _ in range(4)]
    for grad in grads:
        optimizer.zero_grad()
        model(grad).backward()
        optimizer.step()
    assert {slot.dtype for slot in slots(optimizer)} == {torch.bfloat16}
    found = model.weight.full_tensor()
    assert torch.equal(found, by_hand(kind, start, grads))
    assert bring_to_dtype(optimizer, load(kind)) == 0
    assert bring_to_dtype(optimizer, load(kind, "param")) == num_states(kind, KEYS[kind])
    assert {slot.dtype for slot in slots(optimizer)} == {torch.float32}


def job(rank: int, world: int, directory: str, options: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    try:
        run_job(Path(directory), **options)
    finally:
        torch.set_num_threads(before)


def test_a_resume_on_other_ranks_is_no_interruption(tmp_path: Path) -> None:
    """And changes of the key take effect: what is loaded is brought to the other dtype."""
    options: dict[str, Any] = {"optim__kind": "sgd", "optim__momentum": 0.9, "train__steps": 6}
    options |= {"optim__lr": 0.1, "run__reproducible": "any_world"}
    halved = {**options, "optim__state_dtype": "bfloat16"}
    run_ranks(1, job, str(tmp_path / "whole"), halved, timeout_s=120.0)
    run_ranks(1, job, str(tmp_path / "usual"), options, timeout_s=120.0)
    whole, usual = results(tmp_path / "whole"), results(tmp_path / "usual")
    assert whole[0][1] == usual[0][1] and whole[1][1] != usual[1][1]
    parts = tmp_path / "parts"
    run_ranks(2, job, str(parts), {**halved, "stop_after": 2}, timeout_s=120.0)
    run_ranks(4, job, str(parts), {**halved, "stop_after": 2}, timeout_s=120.0)
    run_ranks(1, job, str(parts), halved, timeout_s=120.0)
    assert results(parts) == whole
    changed = tmp_path / "changed"
    run_ranks(2, job, str(changed), {**options, "stop_after": 3}, timeout_s=120.0)
    run_ranks(2, job, str(changed), {**halved, "stop_after": 2}, timeout_s=120.0)
    run_ranks(2, job, str(changed), options, timeout_s=120.0)
    assert [row[0] for row in results(changed)] == [1, 2, 3, 4, 5, 6]
