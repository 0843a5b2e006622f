"""`OffloadedOptimizer`: the numbers of the wrapped optimizer, to the last bit, wherever state lies.

Equality is exact. On CPU a vector kernel may round its last few elements otherwise; chunks begin at
multiples of 1,024 elements, so those are the parameter's last ones there too. With several threads
torch's plain loops cut a parameter by the number of threads as well, in 16 bits with other
roundings at the cuts; tests run with one thread.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardwise as sw
from engine.engine_kit import Mlp, Setting, Uneven, batch, loss_of, make, settings
from ranks import on_ranks
from shardwise import OffloadedOptimizer
from shardwise.engine.core.state import units_in

SMALL = 2**16  # chunk_bytes: several chunks even for these
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adamax": (optim.Adamax, {}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "adamw amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 1}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
}
WAYS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
}
FUSED = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)
SHAPES = [(130, 201), (7,), (), (64, 64), (9_531,)]


def offloaded(
    optimizer: optim.Optimizer, place: str, folder: Path, **how: Any
) -> OffloadedOptimizer:
    how = {"chunk_bytes": SMALL, **how}
    directory = folder / "offload" if place == "nvme" else None
    return OffloadedOptimizer(optimizer, state=place, directory=directory, **how)  # type: ignore[arg-type]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def steps(params: list[nn.Parameter], optimizer: optim.Optimizer, num: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(num):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if step == 2:
            params[1].grad = None
        optimizer.step()


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two state dicts hold the same, to the bit."""
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for number, slots in a["state"].items():
        assert slots.keys() == b["state"][number].keys()
        for name, value in slots.items():
            other = b["state"][number][name]
            if isinstance(value, Tensor):
                assert (value.dtype, value.shape) == (other.dtype, other.shape), name
                assert torch.equal(value, other), (number, name)
            else:
                assert value == other, name


IN_HALF = ("adamw", "adagrad", "rmsprop", "sgd momentum")  # the lines of ours are the same
CASES = [(kind, torch.float32) for kind in KINDS] + [(kind, torch.bfloat16) for kind in IN_HALF]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_kernel(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    cls, own = KINDS[kind]
    for (name, way), place in itertools.product(WAYS.items(), ("none", "cpu", "nvme")):
        if place != "nvme" and name != "default":
            continue
        if name == "fused" and (cls not in FUSED or (cls, dtype) == (optim.SGD, torch.bfloat16)):
            continue  # the latter: see test_refused
        made = []
        for where in (None, place):
            params = parameters(dtype)
            groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
            optimizer = cls(groups, **own, **way)
            if where is not None:
                optimizer = offloaded(optimizer, where, tmp_path)
            steps(params, optimizer)
            made.append((params, optimizer))
        (expected, before), (found, after) = made
        for p, q in zip(expected, found, strict=True):
            assert torch.equal(p, q), (name, place, tuple(p.shape))
        same(before.state_dict(), after.state_dict())
        after.close()


@pytest.mark.parametrize("place", ["none", "cpu", "nvme"])
def test_state_dicts_go_both_ways(place: str, tmp_path: Path) -> None:
    plain = parameters(torch.float32)
    before = optim.AdamW(plain, lr=1e-2)
    steps(plain, before)
    params = [nn.Parameter(p.detach().clone()) for p in plain]
    after = offloaded(optim.AdamW(params, lr=1.0), place, tmp_path)
    after.load_state_dict(before.state_dict())
    assert after.param_groups is after.optimizer.param_groups
    same(before.state_dict(), after.state_dict())
    for params_, optimizer in ((plain, before), (params, after)):
        steps(params_, optimizer)
    again = optim.AdamW(plain, lr=1.0)
    again.load_state_dict(after.state_dict())
    same(before.state_dict(), again.state_dict())
    after.close()


def test_state_that_the_optimizer_has_goes_along(tmp_path: Path) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    plain, wrapped = optim.AdamW(params, lr=1e-2), optim.AdamW(others, lr=1e-2)
    steps(params, plain)
    steps(others, wrapped)
    optimizer = offloaded(wrapped, "nvme", tmp_path)
    assert not wrapped.state  # nothing of it stays in memory
    for params_, any_ in ((params, plain), (others, optimizer)):
        steps(params_, any_)
    same(plain.state_dict(), optimizer.state_dict())
    optimizer.close()


def test_as_a_torch_user_expects(tmp_path: Path) -> None:
    """Schedulers, hooks, closures, a group that comes later, an option that is changed."""
    seen: list[str] = []

    def run(place: str | None) -> tuple[Any, list[nn.Parameter]]:
        params = parameters(torch.float32)
        optimizer: Any = optim.SGD(params[:3], lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(type(o).__name__))
        if place is not None:
            optimizer = offloaded(optimizer, place, tmp_path)
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in params)
            loss.backward()
            return loss

        for step in range(4):
            if step == 2:
                late = {"params": params[3:], "max_lr": 0.3, "min_lr": 0.01, "initial_lr": 0.02}
                optimizer.add_param_group({**optimizer.param_groups[0], **late})
            assert optimizer.step(closure) > 0
            schedule.step()
        return optimizer, params

    plain, expected = run(None)
    optimizer, found = run("nvme")
    assert seen == ["SGD"] * 4 + ["OffloadedOptimizer"] * 4
    for p, q in zip(expected, found, strict=True):
        assert torch.equal(p, q)
    same(plain.state_dict(), optimizer.state_dict())
    assert len(optimizer.state) == 5 and set(optimizer.state[found[0]]) == {"momentum_buffer"}
    optimizer.close()


def test_a_loss_scaler(tmp_path: Path) -> None:
    """A step with an inf in it is left out, here too; the scale is taken back before the norm."""

    def run(place: str | None) -> tuple[Any, list[nn.Parameter]]:
        params = parameters(torch.float32)
        optimizer: Any = optim.AdamW(params, lr=1e-2)
        if place is not None:
            optimizer = offloaded(optimizer, place, tmp_path)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            loss = sum((p**2).sum() for p in params)
            scaler.scale(loss).backward()  # type: ignore[attr-defined]
            if step == 1:
                assert params[0].grad is not None
                params[0].grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9
        return optimizer, params

    plain, expected = run(None)
    optimizer, found = run("nvme")
    for p, q in zip(expected, found, strict=True):
        assert torch.equal(p, q)
    same(plain.state_dict(), optimizer.state_dict())
    assert optimizer.state[found[0]]["step"] == 2
    optimizer.close()


def test_hooks_of_state_dicts_go_along(tmp_path: Path) -> None:
    params = parameters(torch.float32)
    inner = optim.AdamW(params)
    seen: list[str] = []
    inner.register_state_dict_pre_hook(lambda o: seen.append("out"))
    inner.register_load_state_dict_post_hook(lambda o: seen.append("in"))
    optimizer = offloaded(inner, "cpu", tmp_path)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["out", "in"]


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_master_weights(place: str, tmp_path: Path) -> None:
    """As float32 parameters would be stepped; what others write to the parameters counts."""
    params = parameters(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in params]
    plain = optim.AdamW(masters, lr=1e-3)
    optimizer = offloaded(optim.AdamW(params, lr=1e-3), place, tmp_path, master_weights=True)
    for step in range(4):
        for p, m in zip(params, masters, strict=True):
            p.grad = torch.randn(p.shape).bfloat16()
            m.grad = p.grad.float()
        optimizer.step()
        plain.step()
        if step == 2:
            saved = optimizer.state_dict()
        if step == 1:
            with torch.no_grad():
                params[0][3:5] = 0.5
                masters[0][3:5] = 0.5
    for p, m in zip(params, masters, strict=True):
        kept = optimizer.state[p]
        assert torch.equal(kept["master_weight"], m) and torch.equal(p, m.bfloat16())
        assert torch.equal(kept["exp_avg"], plain.state[m]["exp_avg"])
    assert saved["state"][0]["master_weight"].dtype == torch.float32
    optimizer.load_state_dict(saved)
    assert torch.equal(
        optimizer.state[params[0]]["master_weight"], saved["state"][0]["master_weight"]
    )
    optimizer.close()


class Normed(optim.Optimizer):
    """Not element-wise: steps by the norm of the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / p.grad.norm()


class Lion(Normed):
    """An element-wise optimizer of the user's (Chen et al. 2023, arXiv 2302.06675)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    m = state["momentum"]
                    p -= group["lr"] * (0.9 * m + 0.1 * p.grad).sign()
                    m.mul_(0.99).add_(p.grad, alpha=0.01)


def test_an_optimizer_of_the_user(tmp_path: Path) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    plain, optimizer = Lion(params), offloaded(Lion(others), "nvme", tmp_path)
    for params_, any_ in ((params, plain), (others, optimizer)):
        steps(params_, any_)
    same(plain.state_dict(), optimizer.state_dict())
    optimizer.close()


def test_refused(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    for made, text in [
        (optim.LBFGS([weight]), "LBFGS computes the loss several times"),
        (optim.Adafactor([weight]), "Adafactor keeps means over whole rows"),
        (optim.Muon([weight]), "Muon needs each matrix whole"),
        (optim.SparseAdam([weight]), "SparseAdam expects sparse"),
        (Normed([weight]), "Normed steps a parameter otherwise than its parts"),
        (optim.Adam([weight], differentiable=True), "differentiable=True"),
    ]:
        with pytest.raises(ValueError, match=text):
            OffloadedOptimizer(made, state="cpu")
    plain = optim.AdamW([weight])
    for how, text in [
        ({"state": "disk"}, "expected one of none, cpu, nvme, found 'disk'"),
        ({"state": "nvme"}, "needs a directory"),
        ({"state": "cpu", "directory": tmp_path}, "takes no directory"),
        ({"state": "none", "step_on": "cpu"}, "in every step"),
        ({"state": "cpu", "step_on": "gpu"}, "expected device or cpu"),
        ({"state": "cpu", "chunk_bytes": 100}, "at least 65,536"),
        ({"state": "cpu", "write_behind": 0}, "write_behind at least 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            OffloadedOptimizer(plain, **how)  # type: ignore[arg-type]

    optimizer = OffloadedOptimizer(optim.SGD([weight], lr=0.1), state="cpu")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="keeps 'momentum_buffer' now, for which there is no room"):
        optimizer.step()
    assert torch.equal(weight, before)
    halves = nn.Parameter(weight.detach().bfloat16())
    halves.grad = torch.ones_like(halves)
    fused = OffloadedOptimizer(optim.SGD([halves], lr=0.1, momentum=0.9, fused=True), state="cpu")
    with pytest.raises(ValueError, match="use foreach=True"):
        fused.step()
    with pytest.raises(ValueError, match="is in no parameter group"):
        optimizer.step_part({halves: halves})
    turned = nn.Parameter(torch.randn(4, 5).t())
    turned.grad = torch.ones_like(turned)
    with pytest.raises(ValueError, match="not contiguous"):
        OffloadedOptimizer(optim.SGD([turned], lr=0.1), state="cpu").step()


# -- sharded models ------------------------------------------------------------------------------
def trained(
    setting: Setting, cls: Any, place: str | None, how: str, rank: int, world: int, folder: Path
) -> tuple[list[float], Any, Any]:
    """Five steps; the norms that were clipped by."""
    model = setting.shard(make(cls), world)
    optimizer: Any = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if place is not None:
        optimizer = offloaded(optimizer, place, folder)
    if how == "in_backward":
        sw.step_in_backward(model, optimizer)
    norms = []
    for step in range(5):
        loss_of(model(batch(model, step, rank))).backward()
        if how == "clipped":
            norms.append(float(sw.clip_grad_norm_(model.parameters(), 0.05)))
        if how == "by unit" and place is not None:
            for unit in units_in(model):
                held = [p.sharded for p in unit.params if p.sharded.grad is not None]
                optimizer.step_part({p: p.grad.to_local() for p in held})
        else:
            optimizer.step()
        optimizer.zero_grad()
    return norms, model, optimizer


@pytest.mark.parametrize("how", ["clipped", "in_backward", "by unit"])
@on_ranks(2)
def test_sharded(how: str, rank: int, world: int, tmp_path: Path) -> None:
    """Uneven rows, ranks without any, every lifetime of gathered copies."""
    for cls, strategy in ((Mlp, "full_shard"), (Uneven, "shard_grad_op"), (Uneven, "no_shard")):
        setting = Setting(strategy, "shared_memory")
        norms, plain, before = trained(setting, cls, None, how, rank, world, tmp_path)
        for place in ("cpu", "nvme"):
            found, model, after = trained(setting, cls, place, how, rank, world, tmp_path)
            assert norms == found
            for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q.full_tensor()), name
            same_sharded(before.state_dict(), after.state_dict())
            after.close()
    assert not (tmp_path / "offload" / f"rank_{rank:05d}.state").exists()


def same_sharded(a: dict[str, Any], b: dict[str, Any]) -> None:
    for number, slots in a["state"].items():
        for name, value in slots.items():
            other = b["state"][number][name]
            assert type(value) is type(other)
            if hasattr(value, "placements"):
                assert value.placements == other.placements
                value, other = value.full_tensor(), other.full_tensor()
            assert torch.equal(value, other), (number, name)


@on_ranks(4)
def test_sharded_over_replicas(rank: int, world: int, tmp_path: Path) -> None:
    for setting in settings("hybrid_shard", "hybrid_full_optimizer"):
        _, plain, _ = trained(setting, Mlp, None, "", rank, world, tmp_path)
        _, model, after = trained(setting, Mlp, "nvme", "", rank, world, tmp_path)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())
        after.close()


@on_ranks(2)
def test_units_share_no_chunk(rank: int, world: int, tmp_path: Path) -> None:
    """So a unit that steps by itself reads and writes nothing of others."""
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = offloaded(optim.AdamW(model.parameters()), "cpu", tmp_path)
    optimizer.reserve()
    assert optimizer._kept is not None
    for chunk in optimizer._kept.chunks:
        assert len({id(p.entry.unit) for p in chunk.pieces}) == 1
    assert len(optimizer._kept.chunks) == len(units_in(model))
