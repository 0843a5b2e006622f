"""More seams used from outside, as in `test_seams.py`: how things lie.

strategy     a row of stages                      layout/strategy.py
placement    cuts rows at multiples of a block    engine/mesh/rows.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_kit import (
    OPTIMIZERS,
    TRANSPORTS,
    Mlp,
    Plain,
    Setting,
    Uneven,
    batch,
    full,
    grid,
    line,
    loss_of,
    make,
    settings,
)
from torch.distributed.tensor import Shard

import shardwise as sw
from ranks import on_ranks
from shardwise import RowShard
from shardwise.engine.core.state import unit_of
from shardwise.layout import AxisPlacement, Cuts, Lifetime, Placed, Strategy

# -- strategies ------------------------------------------------------------------------------------
SHARD, WHOLE, PARTIAL = Placed.SHARD, Placed.REPLICATE, Placed.PARTIAL
ROWS = (
    # Copies stay from a forward to its backward; gradients wait as partial sums.
    Strategy("kept_partial", AxisPlacement(SHARD, PARTIAL, SHARD), None, Lifetime.PASS),
    # ZeRO-2 inside of each replica, whose ranks keep the whole between steps.
    Strategy(
        "hybrid_kept",
        AxisPlacement(WHOLE, SHARD, SHARD),
        AxisPlacement(WHOLE, WHOLE, WHOLE),
        Lifetime.CLEAN,
    ),
    # The optimizer's state over all ranks, the shard of a replica gathered once a pass.
    Strategy(
        "hybrid_split_pass",
        AxisPlacement(SHARD, SHARD, SHARD),
        AxisPlacement(WHOLE, SHARD, SHARD),
        Lifetime.PASS,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@on_ranks(4)
def test_a_strategy_is_a_row(row: Strategy, rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        plain = Plain(make(Mlp), world)
        given = {"mesh": grid(2, 2) if row.is_hybrid else line(world), "transport": transport}
        model = make(Mlp)
        for module in (*model.layers, model):
            sw.fully_shard(module, strategy=row, **given)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain.model)]
        for step in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(bool(micro) or not row.defers_reduction)
                loss = loss_of(model(batch(Mlp, 2 * step + micro, rank)))
                assert unit_of(model.layers[1]).copy.is_there, f"{row.name} {transport}"
                loss.backward()
                is_kept = unit_of(model.layers[1]).copy.is_there
                assert is_kept == (row.lifetime is Lifetime.CLEAN), f"{row.name} {transport}"
                plain.step(2 * step + micro)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.model.parameters(), strict=True):
            # Four ranks are added in another order than here.
            torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6, msg=name)


# -- a placement -----------------------------------------------------------------------------------
class BlockRows(RowShard):
    """Inner cuts at multiples of a block of rows, so that quantization blocks stay whole."""

    def __init__(self, dim: int, block: int) -> None:
        super().__init__(dim)
        self.block = block

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.block(rows, world, self.block)


class OnOneRank(RowShard):
    """A whole matrix on the last rank, as optimizers of matrices want it."""

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.whole(rows, world, world - 1)


def placed(param: torch.nn.Parameter) -> RowShard | None:
    if param.ndim < 2:
        return None
    return BlockRows(-1, 3) if param.shape[0] == 13 else OnOneRank(0)


def placed_model(setting: Setting, world: int) -> Any:
    return setting.shard(make(Uneven), world, shard_placement_fn=placed)


def close(model: Any, plain: torch.nn.Module, what: str) -> None:
    """Norms, by which gradients are scaled, are sums in another order."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        text = f"{what} {name}"
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6, msg=text)


@on_ranks(2, 4)
def test_a_placement(rank: int, world: int) -> None:
    for setting in settings("full_shard", "shard_grad_op", reshard=(False, 2)):
        plain, model = Plain(make(Uneven), world), placed_model(setting, world)
        weight = model.layers[0][2].weight  # 13 x 97, cut along its last dim
        assert weight.to_local().shape == (13, Cuts.block(97, world, 3).size(rank))
        assert weight.placements == (BlockRows(1, 3),)
        assert model.layers[0][0].weight.to_local().numel() == (97 * 5 if rank == world - 1 else 0)
        optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain.model)]
        for step in range(3):
            loss_of(model(batch(Uneven, step, rank))).backward()
            plain.step(step)
            ours = sw.clip_grad_norm_(model.parameters(), 0.1)
            norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1)
            torch.testing.assert_close(ours, norm, rtol=1e-5, atol=0.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        close(model, plain.model, str(setting))


@on_ranks(2)
def test_operators_on_a_placement(rank: int, world: int) -> None:
    """Numbers, views and writes are those of the whole, whatever DTensor knows of the cut."""
    model = placed_model(Setting("full_shard"), world)
    whole = make(Uneven).layers[0][2].weight.detach().clone()
    weight = model.layers[0][2].weight.detach()
    assert type(weight).__name__ == "ShardTensor"
    assert torch.equal(weight.full_tensor(), whole)
    assert torch.equal(weight.redistribute(placements=[Shard(0)]).full_tensor(), whole)
    for name in ("sum", "norm", "abs", "clone", "double", "t", "argmax", "std"):
        found, want = getattr(weight, name)(), getattr(whole, name)()
        assert torch.equal(full(found), want), name
    assert weight.sum().item() == whole.sum().item()
    assert torch.equal(full(weight @ weight.t()), whole @ whole.t())
    assert torch.equal(full(weight[3:5]), whole[3:5])
    assert torch.equal(full(torch.zeros_like(weight)), torch.zeros_like(whole))
    before = unit_of(model.layers[0]).mark.count
    for t in (weight, whole):
        t[2].fill_(0.5)
        t.mul_(2.0)
        t.clamp_(max=0.9)
        t.index_fill_(1, torch.tensor([0, 96]), 7.0)
    assert torch.equal(weight.full_tensor(), whole)
    assert unit_of(model.layers[0]).mark.count > before, "the next forward gathers again"
    torch.add(whole, 1.0, out=weight)
    torch.div(weight, 2.0, out=whole)  # a plain tensor is written whole
    torch.mul(weight, 0.5, out=weight)
    assert torch.equal(weight.full_tensor(), whole)
    torch.manual_seed(5)
    weight.normal_()
    torch.manual_seed(5)
    assert torch.equal(weight.full_tensor(), whole.normal_())
    weight.copy_(whole * 3.0)
    assert torch.equal(weight.full_tensor(), whole * 3.0)
    again = copy.deepcopy(model)
    assert torch.equal(full(again.layers[0][2].weight), whole * 3.0)
    assert again.layers[0][2].weight.placements == (BlockRows(1, 3),)


@on_ranks(2)
def test_checkpoints_of_a_placement(rank: int, world: int, tmp_path: Path) -> None:
    """Our format, torch's, and state dicts take it to another cut, and back."""
    model = placed_model(Setting("full_shard"), world)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(batch(Uneven, 0, rank))).backward()
    optimizer.step()
    want = {name: full(p) for name, p in model.named_parameters()}
    even = Setting("full_shard").shard(make(Uneven, seed=1), world)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    state = {"model": even.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    even.load_state_dict(state["model"])
    assert all(torch.equal(full(p), want[name]) for name, p in even.named_parameters())
    manager = sw.CheckpointManager(tmp_path / "ours")
    manager.save(1, model, optimizer)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    for placement in (None, placed):
        other = Setting("full_shard").shard(
            make(Uneven, seed=2), world, shard_placement_fn=placement
        )
        others = torch.optim.AdamW(other.parameters())
        manager.load(checkpoint, other, others)
        assert all(torch.equal(full(p), want[name]) for name, p in other.named_parameters())
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            found, before = others.state[q]["exp_avg"], optimizer.state[p]["exp_avg"]
            assert torch.equal(full(found), full(before))


class Short(RowShard):
    """Leaves a row out."""

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.even(rows - 1, world)


@on_ranks(4)
def test_placements_that_cannot_be(rank: int, world: int) -> None:
    def refused(returned: Any, error: type[Exception], text: str, **options: Any) -> None:
        options = {"mesh": line(world), **options}
        with pytest.raises(error, match=text):
            sw.fully_shard(make(Uneven), shard_placement_fn=lambda _: returned, **options)

    refused(Short(0), ValueError, "cuts 0 rows among 4 ranks, expected 1 rows among 4")
    refused(OnOneRank(2), AssertionError, "Shard dim 2 is invalid")
    refused("rows", ValueError, "must return Shard")
    split = {"mesh": grid(2, 2), "strategy": "hybrid_full_optimizer"}
    refused(OnOneRank(0), NotImplementedError, "use hybrid_shard, or Shard", **split)
