"""State dicts: sharded, aliasing, full on one rank, loaded, saved by DCP."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from fsdp2_kit import TwoLayer, both, engines, fs, inputs, mesh_of, shard_tower, tower
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ranks import on_ranks


def whole_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


@engines
@on_ranks(2)
def test_entries_are_parts_at_any_moment(engine: str, rank: int, world: int) -> None:
    for mesh_dims in ((2,),):
        for reshard in (True, False):
            model, plain = both(tower(2, dim=5, gain=True))
            shard_tower(engine, model, mesh=mesh_of(*mesh_dims), reshard_after_forward=reshard)
            out = model(inputs(rank, dim=5))
            for moment in ("after forward", "after backward"):
                state = model.state_dict()
                assert list(state) == list(plain.state_dict())
                assert all(isinstance(t, DTensor) for t in state.values()), moment
                for n, t in whole_of(state).items():
                    assert torch.equal(t, plain.state_dict()[n]), (moment, n)
                if moment == "after forward":
                    out = model(inputs(rank, dim=5))  # state_dict() has resharded
                    out.sum().backward()


@engines
@on_ranks(2)
def test_entries_alias_the_parameters(engine: str, rank: int, world: int) -> None:
    model = shard_tower(engine, tower(2, dim=5), mesh=mesh_of(world))
    early = model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(inputs(rank, step, dim=5)).square().sum().backward()
        optimizer.step()
    for n, p in model.named_parameters():
        assert torch.equal(early[n].to_local(), p.to_local()), n
        if p.to_local().numel():
            assert early[n].to_local().data_ptr() == p.to_local().data_ptr()


@engines
@on_ranks(2)
def test_loading_parts_in_place_and_by_assignment(engine: str, rank: int, world: int) -> None:
    for assign in (False, True):
        source = tower(2, dim=5)
        with torch.no_grad():
            for p in source.parameters():
                p.mul_(3)
        model = shard_tower(engine, tower(2, dim=5), mesh=mesh_of(world))
        holds = model.state_dict()
        model.load_state_dict(
            {
                n: distribute_tensor(t, holds[n].device_mesh, holds[n].placements)
                for n, t in source.state_dict().items()
            },
            assign=assign,
        )
        assert torch.allclose(model(inputs(rank, dim=5)), source(inputs(rank, dim=5)))


@engines
@on_ranks(2)
def test_full_on_the_first_rank(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(3, gain=True))
    shard_tower(engine, model, mesh=mesh_of(world))
    kept = {}
    for n, t in model.state_dict().items():
        whole = t.full_tensor()
        if rank == 0:
            kept[n] = whole.cpu()
    if rank == 0:
        for n, t in plain.state_dict().items():
            assert torch.equal(kept[n], t)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    assert bool(full) == (rank == 0)
    for n, t in full.items():
        assert torch.equal(t, plain.state_dict()[n])


@engines
@on_ranks(2)
def test_loading_from_the_first_rank_alone(engine: str, rank: int, world: int) -> None:
    source = tower(2, gain=True)
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1)
    model = shard_tower(engine, tower(2, gain=True), mesh=mesh_of(world))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = source.state_dict() if rank == 0 else {}
    set_model_state_dict(model, state, options=options)
    assert torch.allclose(model(inputs(rank)), source(inputs(rank)))


@engines
@on_ranks(2)
def test_optimizer_state_goes_through_dcp(engine: str, rank: int, world: int, tmp_path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder, src=0)

    def start(seed: int) -> tuple[Any, Any]:
        model = tower(2, dim=5)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(seed)
        model = shard_tower(engine, model, mesh=mesh_of(world))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, i: int) -> torch.Tensor:
        loss = model(inputs(rank, i, dim=5)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, optimizer = start(0)
    for i in range(2):
        step(model, optimizer, i)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder[0])
    want = [step(model, optimizer, i) for i in (2, 3)]

    other, other_optimizer = start(1)
    state = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, other_optimizer, state["optimizer"])
    got = [step(other, other_optimizer, i) for i in (2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@engines
@on_ranks(2)
def test_full_optimizer_state(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    opts = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
    for m, opt in zip((model, plain), opts, strict=True):
        m(inputs(0)).square().sum().backward()  # the same data on all ranks
        opt.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, opts[0], options=options)
    want = get_optimizer_state_dict(plain, opts[1])
    if rank == 0:
        for name, state in want["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(full["state"][name][key], value)


@engines
@on_ranks(2)
def test_placements_of_entries(engine: str, rank: int, world: int) -> None:
    model, plain = both(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    fs(engine).fully_shard(
        model,
        mesh=mesh_of(world),
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None,
    )
    for n, t in model.state_dict().items():
        assert t.placements == (Shard(1) if t.ndim == 2 else Shard(0),)
        assert torch.equal(t.full_tensor(), plain.state_dict()[n])


@engines
@on_ranks(2)
def test_buffers_are_in_it(engine: str, rank: int, world: int) -> None:
    model = shard_tower(engine, nn.Sequential(TwoLayer(buffer=True)), mesh=mesh_of(world))
    state = model.state_dict()
    assert type(state["0.shift"]) is torch.Tensor
    copy.deepcopy(state)
