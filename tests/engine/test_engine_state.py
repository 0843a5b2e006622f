"""State dicts, forwards without gradients, and what stays in memory after them."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import torch
import torch.nn as nn
from engine_kit import (
    OPTIMIZERS,
    STRATEGIES,
    ConvNorm,
    Mlp,
    Setting,
    Uneven,
    batch,
    full,
    line,
    loss_of,
    make,
    same_weights,
    settings,
    weights_of,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes

EVERY = settings(*STRATEGIES, reshard=(False, None))
RELEASING = settings("full_shard", reshard=(True, False, None))


@on_ranks(2)
def test_names_and_values_are_the_plain_ones(rank: int, world: int) -> None:
    for setting in EVERY:
        for cls in (Uneven, ConvNorm):
            plain = make(cls)
            model = setting.shard(copy.deepcopy(plain), world)
            sharded = [m for m in model.modules() if isinstance(m, sw.FSDPModule)]
            for moment in ("at rest", "after forward", "after backward", "after unshard"):
                state = model.state_dict()
                expected = plain.state_dict()
                assert list(state) == list(expected)
                for name, value in state.items():
                    is_param = name in dict(plain.named_parameters())
                    assert isinstance(value, DTensor) == is_param, f"{setting} {moment}: {name}"
                    if is_param:
                        assert torch.equal(full(value), expected[name])
                if moment == "at rest":
                    loss = loss_of(model(batch(cls, 0, rank)))
                elif moment == "after forward":
                    loss.backward()
                elif moment == "after backward":
                    for module in sharded:
                        module.unshard()
            for module in sharded:
                module.reshard()
            assert gathered_bytes(model) == 0 or setting.strategy in STRATEGIES[:3]


@on_ranks(2)
def test_a_state_dict_aliases_the_parameters(rank: int, world: int) -> None:
    """Taken before training, it shows the weights after it, as a plain one does."""
    for setting in EVERY:
        model = setting.shard(make(Uneven), world)
        state = model.state_dict()
        opt = OPTIMIZERS["adamw"](model.parameters())
        loss_of(model(batch(Uneven, 0, rank))).backward()
        opt.step()
        for name, p in model.named_parameters():
            assert torch.equal(state[name].to_local(), p.to_local()), f"{setting}: {name}"


@on_ranks(1, 2, 3, 4)
def test_a_file_of_one_strategy_loads_into_every_other(rank: int, world: int, tmp_path) -> None:
    """DCP, through a file that any world may read: whole weights of 1 rank into 4, and back."""
    import torch.distributed.checkpoint as dcp

    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        source = Setting(strategy).shard(make(Uneven, seed=3), world)
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / strategy)
        for other in STRATEGIES:
            model = Setting(other).shard(make(Uneven, seed=4), world)
            state = model.state_dict()
            dcp.load({"model": state}, checkpoint_id=tmp_path / strategy)
            model.load_state_dict(state)
            same_weights(model, make(Uneven, seed=3).state_dict(), f"{strategy} into {other}")


def save_on(rank: int, world: int, path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    model = Setting("full_shard").shard(make(Uneven, seed=6), world)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def load_on(rank: int, world: int, path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    for strategy in STRATEGIES:
        model = Setting(strategy).shard(make(Uneven, seed=7), world)
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=path)
        x = batch(Uneven, 0, rank)
        assert torch.equal(model(x), make(Uneven, seed=6)(x)), f"{strategy} on {world} ranks"


def test_a_file_of_one_world_loads_into_another(tmp_path) -> None:
    from ranks import run_ranks

    for world in (3, 2):
        run_ranks(world, save_on, tmp_path / str(world))
        for other in (1, 2, 4):
            run_ranks(other, load_on, tmp_path / str(world))


@on_ranks(2)
def test_forwards_without_gradients_release_everything(rank: int, world: int) -> None:
    for setting in RELEASING:
        plain = make(Uneven).eval()
        model = setting.shard(copy.deepcopy(plain), world).eval()
        x = batch(Uneven, 0, rank)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(model(x), plain(x))
            if setting.reshard is not False:  # else the user has asked to keep them
                assert gathered_bytes(model) == 0, f"{setting} {context.__name__}"
            assert all(isinstance(p, DTensor) for p in model.parameters())


@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(rank: int, world: int) -> None:
    for setting in EVERY:
        models = [setting.shard(make(Uneven), world) for _ in range(2)]
        opts = [OPTIMIZERS["adamw"](m.parameters()) for m in models]
        for step in range(3):
            x = batch(Uneven, step, rank)
            with torch.inference_mode():
                models[0].eval()(x)
            with torch.no_grad():
                models[0](x)
            models[0].train()
            for m, opt in zip(models, opts, strict=True):
                loss_of(m(x)).backward()
                if m is models[0]:
                    with torch.no_grad():
                        m(x)
                opt.step()
                opt.zero_grad()
        same_weights(models[0], weights_of(models[1]), str(setting))


@on_ranks(2)
def test_a_forward_without_gradients_between_forward_and_backward(rank: int, world: int) -> None:
    for setting in EVERY:
        models = [setting.shard(make(Uneven), world) for _ in range(2)]
        for m in models:
            loss = loss_of(m(batch(Uneven, 0, rank)))
            if m is models[0]:
                with torch.no_grad():
                    m(batch(Uneven, 1, rank))
            loss.backward()
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert torch.equal(p.grad.to_local(), q.grad.to_local()), str(setting)


@on_ranks(2)
def test_memory_is_freed_with_the_model(rank: int, world: int) -> None:
    """Without the garbage collector: no circle holds the buffers."""
    import gc

    gc.disable()
    try:
        for setting in EVERY:
            model = setting.shard(make(Mlp), world)
            for _ in range(2):
                loss_of(model(batch(Mlp, 0, rank))).backward()
            units = [weakref.ref(sw.engine.module.unit_of(m)) for m in (model, *model.layers)]
            shards = [weakref.ref(p) for p in model.parameters()]
            buffers = [weakref.ref(b.out) for u in units for b in u().buckets]
            del model
            left = [r() for r in (*units, *shards, *buffers) if r() is not None]
            assert not left, f"{setting}: {len(left)} objects left, e.g. {left[0]!r:.80}"
    finally:
        gc.enable()


@on_ranks(2)
def test_pickles_and_copies_are_compact(rank: int, world: int) -> None:
    """128 bytes in a buffer of 2 MiB are copied as 128 bytes, layout and all."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(8, 8, bias=False))
    sw.fully_shard(model, mesh=line(world))
    small = model[1].weight
    assert small.to_local().untyped_storage().nbytes() == small.to_local().nbytes
    copied = copy.deepcopy(small)
    assert copied.to_local().untyped_storage().nbytes() == small.to_local().nbytes
    assert isinstance(copied, nn.Parameter) and copied.requires_grad
    assert copied.placements == small.placements and copied.shape == small.shape
    file = io.BytesIO()
    torch.save(small, file)
    assert file.tell() < 10_000
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(small) and torch.equal(loaded.to_local(), small.to_local())
    with torch.no_grad():
        copied.zero_()
        loaded.zero_()
    assert small.to_local().abs().sum() > 0


@on_ranks(2)
def test_torch_save_of_a_state_dict(rank: int, world: int, tmp_path) -> None:
    for setting in EVERY:
        model = setting.shard(make(Uneven, seed=1), world)
        path = tmp_path / f"{rank}.pt"
        torch.save(model.state_dict(), path)
        other = setting.shard(make(Uneven, seed=2), world)
        other.load_state_dict(torch.load(path, weights_only=False))
        same_weights(other, make(Uneven, seed=1).state_dict(), str(setting))


@on_ranks(2)
def test_loading_what_does_not_fit(rank: int, world: int) -> None:
    import pytest

    model = Setting("full_shard").shard(make(Mlp), world)
    state = make(Mlp).state_dict()
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
        model.load_state_dict({**state, "layers.1.weight": torch.zeros(9, 8)})
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        model.load_state_dict({n: t for n, t in state.items() if n != "norm.bias"})
    dtensors = {
        n: distribute_tensor(t, line(world), p.placements, src_data_rank=None)
        for (n, t), p in zip(state.items(), model.parameters(), strict=True)
    }
    model.load_state_dict(dtensors)
    same_weights(model, state)


@on_ranks(2)
def test_assign_reaches_every_module_of_a_list(world: int) -> None:
    """Modules of one unit are loaded one after the other."""
    model = make(Mlp)
    sw.fully_shard([model.layers[0], model.norm], mesh=line(world))
    sw.fully_shard(model, mesh=line(world))
    new = {n: (p.detach() + 1) for n, p in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), new[name].to_local()), name
    model(batch(model, 0, 0))
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), new[name].to_local()), name


@on_ranks(2)
def test_in_inference_mode(rank: int, world: int) -> None:
    """An evaluation writes a checkpoint; training goes on."""
    for setting in EVERY:
        plain, model = make(Mlp), setting.shard(make(Mlp), world)
        with torch.inference_mode():
            model(batch(Mlp, 0, rank))
            state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.equal(full(state[name]), value), f"{setting}: {name}"
        loss_of(model(batch(Mlp, 0, rank))).backward()
