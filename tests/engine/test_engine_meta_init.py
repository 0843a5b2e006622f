"""From the meta device to weights that do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Blocks,
    ConvNorm,
    Mlp,
    Setting,
    Uneven,
    batch,
    loss_of,
    make,
    same_weights,
    settings,
    weights_of,
)

import shardwise as sw
from ranks import on_ranks


def on_meta(cls: Any) -> Any:
    with torch.device("meta"):
        return cls()


def one_process(cls: Any, seed: int) -> nn.Module:
    """The weights that `reset_parameters` of all modules, in module order, gives one process."""
    model = cls()
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


class UnevenInit(Uneven):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)


@on_ranks(1, 2, 3, 4)
def test_materialize_gives_the_weights_of_one_process(rank: int, world: int) -> None:
    for setting in settings(*STRATEGIES):
        for cls in (Mlp, UnevenInit, Blocks, ConvNorm):
            expected = {n: p.detach() for n, p in one_process(cls, 5).named_parameters()}
            model = setting.shard(on_meta(cls), world)
            assert all(p.is_meta for p in model.parameters())
            torch.manual_seed(rank)  # ranks' own streams must play no part
            before = torch.get_rng_state()
            sw.materialize(model, seed=5)
            assert torch.equal(torch.get_rng_state(), before)
            same_weights(model, expected, f"{setting} {cls.__name__}")
            loss_of(model(batch(cls, 0, rank))).backward()


@on_ranks(4)
def test_materialize_on_two_by_two(rank: int, world: int) -> None:
    for cls in (Mlp, UnevenInit, Blocks):
        expected = {n: p.detach() for n, p in one_process(cls, 5).named_parameters()}
        for strategy in HYBRID_STRATEGIES:
            model = Setting(strategy).shard(on_meta(cls), world)
            sw.materialize(model, seed=5)
            same_weights(model, expected, f"{strategy} {cls.__name__}")


@on_ranks(2, 3)
def test_to_empty_and_reset_parameters(rank: int, world: int) -> None:
    """FSDP2's way: the same weights, without `materialize`."""
    for setting in settings("full_shard", "shard_grad_op"):
        for cls in (Mlp, Blocks):
            model = setting.shard(on_meta(cls), world)
            model.to_empty(device="cpu")
            torch.manual_seed(5)
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            expected = {n: p.detach() for n, p in one_process(cls, 5).named_parameters()}
            same_weights(model, expected, f"{setting} {cls.__name__}")
            loss_of(model(batch(cls, 0, rank))).backward()
            assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_tied_parameters_stay_tied(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(on_meta(Blocks), world)
    assert model.head.weight is model.embed.weight
    sw.materialize(model, seed=1)
    assert model.head.weight is model.embed.weight
    model(batch(model, 0, rank))
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_assigning_a_state_dict(rank: int, world: int) -> None:
    for setting in settings("full_shard", "shard_grad_op"):
        source = setting.shard(make(Uneven), world)
        model = setting.shard(on_meta(Uneven), world)
        model.load_state_dict(source.state_dict(), assign=True)
        x = batch(Uneven, 0, rank)
        assert torch.equal(model(x), source(x))
        same_weights(model, weights_of(source), str(setting))
        opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, source)]
        for m, opt in zip((model, source), opts, strict=True):
            loss_of(m(x)).backward()
            opt.step()
        assert torch.equal(model(x), source(x))


@on_ranks(2)
def test_forgotten_initialisation_is_an_error(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(on_meta(Mlp), world)
    with pytest.raises(RuntimeError, match=r"meta device: .*layers\.0\.weight"):
        model(batch(Mlp, 0, rank))


@on_ranks(2)
def test_a_module_without_initialiser_is_named(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(on_meta(Uneven), world)
    with pytest.raises(RuntimeError, match="gain"):
        sw.materialize(model, seed=1)
    sw.materialize(model, seed=1, init=lambda m: [nn.init.ones_(p) for p in m._parameters.values()])
    assert all(torch.equal(w, torch.ones_like(w)) for w in weights_of(model).values())


@on_ranks(2)
def test_never_more_than_one_unit(rank: int, world: int) -> None:
    """No allocation while materialising is larger than one of the three units."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_meta and "empty" in func.name():
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    model = Setting("full_shard", "c10d").shard(on_meta(Mlp), world)
    with Largest() as largest:
        sw.materialize(model, seed=1)
    assert largest.bytes <= (8 * 8 + 8) * 4
