"""What people do to the parameters of a model: inspect, reshape, prune, quantise, adapt, optimise.

At rest a parameter is a DTensor of logical shape: statistics are those of the whole, on every rank.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    STRATEGIES,
    Mlp,
    Setting,
    Uneven,
    batch,
    full,
    loss_of,
    make,
    part,
    same_weights,
    settings,
)
from torch.nn.utils import parametrize, prune

import shardwise as sw
from ranks import on_ranks

EVERY = settings(*STRATEGIES)
STATISTICS: dict[str, Any] = {
    "mean": lambda p: p.mean(),
    "sum": lambda p: p.sum(),
    "norm": lambda p: p.norm(),
    "norm_1": lambda p: p.norm(p=1),
    "vector_norm_inf": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "abs_max": lambda p: p.abs().max(),
    "std": lambda p: p.std(),
    "var": lambda p: p.var(),
    "nonzero share": lambda p: (p > 0).float().mean(),
    "mean of squares": lambda p: p.pow(2).mean(),
}


def pair(setting: Setting, world: int, cls: Any = Uneven) -> tuple[Any, nn.Module]:
    plain = make(cls)
    return setting.shard(copy.deepcopy(plain), world), plain


@on_ranks(1, 2, 3)
def test_statistics(rank: int, world: int) -> None:
    """By `item()`, `float()` and as a tensor; some shards are empty."""
    for setting in EVERY:
        model, plain = pair(setting, world)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.shape == q.shape and p.numel() == q.numel() and p.dtype == q.dtype
            for what, statistic in STATISTICS.items():
                if q.numel() == 1 and what in ("std", "var"):
                    continue
                found, want = statistic(p.detach()), statistic(q.detach())
                for value in (found.item(), float(found), full(found).item()):
                    assert value == pytest.approx(want.item(), rel=1e-5, abs=1e-7), f"{name} {what}"
            assert f"{p.mean():.4f}" == f"{q.mean():.4f}"
            assert bool((p == p).all())
            assert p.tolist() == q.tolist()


@on_ranks(2)
def test_statistics_of_gradients(rank: int, world: int) -> None:
    for setting in EVERY:
        model, plain = pair(setting, world)
        for m in (model, plain):
            loss_of(m(batch(m, 0, 0))).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            for statistic in STATISTICS.values():
                if q.numel() > 1:
                    found, want = statistic(p.grad).item(), statistic(q.grad).item()
                    assert found == pytest.approx(want, rel=1e-4, abs=1e-7)


@on_ranks(2)
def test_views_and_arithmetic(rank: int, world: int) -> None:
    for setting in EVERY:
        model, plain = pair(setting, world, Mlp)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p, q = p.detach(), q.detach()
            results = {
                "view": lambda t: t.view(-1),
                "reshape": lambda t: t.reshape(2, -1),
                "flatten": lambda t: t.flatten(),
                "t": lambda t: t.t() if t.ndim == 2 else t,
                "sum": lambda t: t + 2 * t - t / 3,
                "product": lambda t: t * t,
                "row": lambda t: t[1],
                "rows": lambda t: t[1:3],
                "cast": lambda t: t.to(torch.bfloat16),
                "where": lambda t: torch.where(t > 0, t, 0.0),
                "matmul": lambda t: t @ t.t() if t.ndim == 2 else t,
            }
            for what, fn in results.items():
                torch.testing.assert_close(full(fn(p)), fn(q), msg=f"{setting}: {what}")


@on_ranks(2, 3)
def test_optimizers_in_all_their_forms(rank: int, world: int) -> None:
    """Element-wise ones work on the shards alone; the same bits as on whole weights."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"foreach": False, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
    ]
    for kind, options in kinds:
        model, plain = pair(Setting("full_shard"), world)
        opts = [kind(m.parameters(), lr=0.01, **options) for m in (model, plain)]
        for step in range(3):
            for m, opt in zip((model, plain), opts, strict=True):
                opt.zero_grad()
                loss_of(m(batch(m, step, 0))).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p.grad.copy_(q.grad)  # means of three equal numbers may round
            for opt in opts:
                opt.step()
        state = dict(plain.named_parameters())
        same_weights(model, {n: p.detach() for n, p in state.items()}, f"{kind.__name__} {options}")


@on_ranks(2, 3)
def test_fused_optimizers(rank: int, world: int) -> None:
    """torch's fused CPU kernels round by the cut (vector or tail), hence a tolerance."""
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        model, plain = pair(Setting("full_shard"), world)
        opts = [kind(m.parameters(), lr=0.01, fused=True) for m in (model, plain)]
        for m, opt in zip((model, plain), opts, strict=True):
            loss_of(m(batch(m, 0, 0))).backward()
            opt.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.to_local(), part(q.detach(), p), rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_masks_by_hand(rank: int, world: int) -> None:
    """Magnitude pruning on sharded weights: a mask is a DTensor like its parameter."""
    for setting in EVERY:
        model, plain = pair(setting, world, Mlp)
        for m in (model, plain):
            for p in m.parameters():
                if p.ndim == 2:
                    with torch.no_grad():
                        p.mul_((p.abs() > 0.1).float())
        assert torch.equal(model(batch(Mlp, 0, rank)), plain(batch(Mlp, 0, rank)))


@on_ranks(2)
def test_pruned_modules(rank: int, world: int) -> None:
    """torch.nn.utils.prune before sharding: `weight_orig` is sharded, the mask is a buffer."""
    plain = make(Mlp)
    for layer in plain.layers:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    for setting in EVERY:
        model = make(Mlp)
        for layer in model.layers:
            prune.l1_unstructured(layer, "weight", amount=0.3)
        setting.shard(model, world)
        reference = make(Mlp)
        for layer in reference.layers:
            prune.l1_unstructured(layer, "weight", amount=0.3)
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        for step in range(2):
            for m, opt in zip((model, reference), opts, strict=True):
                opt.zero_grad()
                loss_of(m(batch(m, step, 0))).backward()
                opt.step()
        weights = {n: p.detach() for n, p in reference.named_parameters()}
        same_weights(model, weights, str(setting))


class FakeQuantised(nn.Module):
    """Straight-through rounding to 4 bits."""

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        step = w.detach().abs().max() / 7
        return w + (torch.round(w / step) * step - w).detach()


@on_ranks(2)
def test_fake_quantised_weights(rank: int, world: int) -> None:
    """A parametrisation sees the whole weight, so its scale is that of the whole."""

    def build() -> Any:
        model = make(Mlp)
        for layer in model.layers:
            parametrize.register_parametrization(layer, "weight", FakeQuantised())
        return model

    for setting in EVERY:
        model, plain = setting.shard(build(), world), build()
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(2):
            for m, opt in zip((model, plain), opts, strict=True):
                opt.zero_grad()
                loss_of(m(batch(m, step, 0))).backward()
                opt.step()
        same_weights(model, {n: p.detach() for n, p in plain.named_parameters()}, str(setting))


@on_ranks(2)
def test_a_sub_module_replaced_before_sharding(rank: int, world: int) -> None:
    for setting in EVERY:
        models = []
        for _ in range(2):
            model = make(Mlp)
            torch.manual_seed(9)
            model.layers[1] = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 8))
            models.append(model)
        setting.shard(models[0], world)
        for m in models:
            loss_of(m(batch(m, 0, 0))).backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p.grad.to_local(), part(q.grad, p))


class Lora(nn.Module):
    """A frozen linear layer with a trainable low-rank path."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@on_ranks(2)
def test_low_rank_adapters_over_a_frozen_base(rank: int, world: int) -> None:
    """Right gradients, none for the base, and reduced bytes of the adapters alone."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reduced(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.namespace == "c10d" and "reduce_scatter" in func.name():
                self.numel += args[1].numel() if isinstance(args[1], torch.Tensor) else 0
            return func(*args, **(kwargs or {}))

    def build() -> nn.Module:
        return nn.Sequential(*(Lora() for _ in range(3)))

    for setting in EVERY:
        plain = make(build)
        model = copy.deepcopy(plain)
        for block in model:
            sw.fully_shard(block, **setting.options(world))
        sw.fully_shard(model, **setting.options(world))
        opts = [
            torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
            for m in (model, plain)
        ]
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            with Reduced() as reduced:
                loss_of(model(x)).backward()
            loss_of(plain(x)).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None) == ("base" in name)
            if setting == Setting("full_shard", "c10d"):
                adapters, counts = 3 * 2 * 16, 3 * 2 * world
                rounded = 3 * world * 3  # each chunk to 16 bytes
                assert adapters <= reduced.numel <= adapters + counts + rounded
            for opt in opts:
                opt.step()
                opt.zero_grad()
        same_weights(model, {n: p.detach() for n, p in plain.named_parameters()}, str(setting))


@on_ranks(2)
def test_freezing_and_thawing_between_steps(rank: int, world: int) -> None:
    for setting in EVERY:
        model, plain = pair(setting, world, Mlp)
        for frozen in ((), (0,), (0, 2), (1,), ()):
            for m in (model, plain):
                m.zero_grad()
                for i, layer in enumerate(m.layers):
                    layer.requires_grad_(i not in frozen)
                loss_of(m(batch(m, 0, 0))).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                if q.grad is None:
                    assert p.grad is None, f"{setting} frozen {frozen}: {name}"
                else:
                    assert torch.equal(p.grad.to_local(), part(q.grad, p)), f"{setting}: {name}"


@on_ranks(2)
def test_a_sharded_parameter_in_the_hands_of_others_says_so(rank: int, world: int) -> None:
    model, _ = pair(Setting("full_shard"), world, Mlp)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*register_fsdp_forward_method"):
        model(batch(Mlp, 0, rank))
        model.layers[0].weight @ torch.ones(8)
    with pytest.raises(RuntimeError, match="full_tensor"):
        model.layers[0].weight.detach().numpy()
