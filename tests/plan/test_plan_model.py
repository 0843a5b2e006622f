"""The plan is what the engine then does: same units, same bytes, same collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.grouping import choose_units
from shardwise.engine.services.shard_model import override_for
from shardwise.layout import MixedPrecisionPolicy
from shardwise.plan.model import plan_model
from shardwise.train.config import Config, DecoderConfig
from shardwise.train.decoder import Decoder

SIZES = DecoderConfig(dim=32, layers=3, heads=2, vocab_size=97)
OVERRIDES: list[dict[str, Any]] = [{}, {"blocks.0": {"strategy": "shard_grad_op"}, "": {}}]


def decoder(**sizes: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(SIZES, Config().data.seq_len)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("overrides", OVERRIDES)
@on_ranks(2)
def test_plan_is_what_the_engine_does(
    strategy: str, overrides: dict[str, Any], rank: int, world: int
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = decoder()
    groups = choose_units(model, "Block")
    plan = plan_model(
        model,
        groups,
        strategy=strategy,
        policy=policy,
        world=world,
        overrides=override_for(groups, overrides),
    )
    sw.shard_model(
        model,
        mesh=init_device_mesh("cpu", (world,)),
        strategy=strategy,
        unit="Block",
        transport="c10d",
        mp_policy=policy,
        overrides=overrides,
    )
    sw.materialize(model, seed=0)
    units = units_in(model)
    tokens = torch.zeros(1, 9, dtype=torch.long)
    for _ in range(2):
        with sw.record_events(model) as log:
            model(tokens).backward()
        for p in model.parameters():
            p.data.mul_(1.0)  # a step
            p.grad = None
    found = {unit.name: unit for unit in units}
    assert [u.name for u in plan.units] == [f"blocks.{i}" for i in range(3)] + ["(root)"]
    for planned in plan.units:
        unit = found[planned.name]
        assert planned.strategy == unit.strategy
        assert planned.layout.shard_bytes == sum(b.layout.shard_bytes for b in unit.buckets)
        assert planned.layout.full_bytes == unit.full_bytes
        if unit.mesh.shard.size == 1:
            continue
        gathers = sum(c.kind == "gather" for c in planned.collectives)
        issued = log.text("AG").split(" | ").count(f"AG {unit.name}") * len(unit.buckets)
        assert issued == gathers, planned.name


@on_ranks(4)
def test_plan_of_shards_that_replicas_share_out(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = decoder()
    groups = choose_units(model, "Block")
    strategy = "hybrid_full_optimizer"
    plan = plan_model(model, groups, strategy=strategy, policy=policy, world=2, replicas=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sw.shard_model(model, mesh=mesh, strategy=strategy, unit="Block", mp_policy=policy)
    sw.materialize(model, seed=0)
    with sw.record_events(model) as log:
        model(torch.zeros(1, 9, dtype=torch.long)).backward()
    found = {unit.name: unit for unit in units_in(model)}
    for planned in plan.units:
        unit, layout = found[planned.name], planned.layout
        assert layout.middle_bytes == sum(b.bucket.buffer.nbytes for b in unit.buckets)
        kept = sum(b.registered.buffer.nbytes for b in unit.buckets)
        assert kept <= layout.shard_bytes
        if rank == 0:  # it owns most
            assert kept == layout.shard_bytes
            grads = sum(p.grad.to_local().nbytes for p in (q.sharded for q in unit.params))
            assert layout.grad_bytes == grads
        issued = log.text("HG").split(" | ").count(f"HG {unit.name}")
        assert issued * len(unit.buckets) == len(layout.refreshes)


def test_what_a_rank_keeps() -> None:
    """Two matrices of 8 x 8 without bias, 4 ranks, by hand."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    )
    policy = MixedPrecisionPolicy()
    plan = plan_model(model, [["0"]], strategy="full_shard", policy=policy, world=4)
    part = 8 * 8 * 4 // 4
    assert [u.kept_bytes for u in plan.units] == [4 * part] * 2
    assert plan.gathered_bytes == 2 * 8 * 8 * 4
    gather, reduce = 3 * part, 3 * (part + 16)  # the count of 4 bytes, rounded up
    assert [u.received_bytes for u in plan.units] == [2 * gather + reduce] * 2
    hybrid = plan_model(
        model,
        [["0"]],
        strategy="hybrid_full_optimizer",
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        world=2,
        replicas=2,
    )
    assert [u.kept_bytes for u in hybrid.units] == [4 * part + 8 * 8 * 2 // 2] * 2
    middle = 8 * 8 * 2 // 2
    assert [u.refreshed_bytes for u in hybrid.units] == [middle // 2] * 2
    first, second = 8 * 8 // 2 + 8, 8 * 8 // 4 + 8  # elements of a reduction: a count, rounded up
    assert hybrid.units[0].received_bytes == 2 * middle + 2 * (first + second)
    assert (plan.refreshed_bytes, hybrid.refreshed_bytes) == (0, middle)
    kept = plan_model(model, [["0"]], strategy="shard_grad_op", policy=policy, world=4)
    assert kept.received_bytes == 2 * (gather + reduce)
