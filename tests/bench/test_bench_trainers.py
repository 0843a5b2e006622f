"""Every engine trains the same model, and what it communicates is what it has to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.bench.engines import parse_engine
from shardwise.bench.trainers import Setup, make_trainer
from shardwise.bench.workload import workload_named
from shardwise.errors import ConfigError

TINY = workload_named("tiny")
ENGINES = (
    "shardwise", "shardwise:c10d", "shardwise:shard_grad_op", "shardwise:no_shard",
    "shardwise:keep:last", "shardwise:in_backward:last", "fsdp2", "fsdp2:keep:hold:last", "ddp",
    "ddp:last", "fsdp1", "fsdp1:keep:last", "fsdp2:hybrid",
)  # fmt: skip
MICRO = 4


def trainer_of(name, precision="fp32", micro=MICRO):
    setup = Setup(parse_engine(name), TINY.build(), precision, micro, TINY.unit, "foreach", lr=1e-2)
    return make_trainer(setup)


def losses_of(trainer, rank, world, steps=3):
    batches = TINY.batches(rank, world)
    found = torch.stack([trainer.step(batches) for _ in range(steps)])
    dist.all_reduce(found)
    return (found / world).tolist()


@pytest.mark.parametrize("name", ENGINES)
@on_ranks(2)
def test_same_model(rank, world, name):
    expected = losses_of(trainer_of("fsdp2"), rank, world)
    assert losses_of(trainer_of(name), rank, world) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]


@on_ranks(2)
def test_a_step_in_each_backward_is_another_model(rank, world):
    with pytest.raises(ConfigError, match="add the option last"):
        trainer_of("shardwise:in_backward")
    expected = losses_of(trainer_of("fsdp2", micro=1), rank, world)
    found = losses_of(trainer_of("shardwise:in_backward", micro=1), rank, world)
    assert found[-1] != pytest.approx(expected[-1], rel=1e-3), "it stepped four times as often"


@on_ranks(2)
def test_a_step_in_the_backward_is_the_same_step(rank, world):
    batches = TINY.batches(rank, world)
    losses = []
    for name in ("fsdp2", "shardwise:in_backward"):
        trainer = trainer_of(name, micro=1)
        losses.append([trainer.step([batch]).item() for batch in batches])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["shardwise", "fsdp2", "ddp", "floor"])
@on_ranks(2)
def test_units_are_compiled(rank, world, kind):
    """Each unit but the root, once, and only where that is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr(torch.nn.Module, "compile", lambda self, *_, **__: compiled.append(self))
        trainer_of(kind)
        assert not compiled
        trainer = trainer_of(f"{kind}:compile")
        model = getattr(trainer.model, "module", trainer.model)
        assert compiled == list(model.blocks)


@on_ranks(2)
def test_the_floor_trains_another(rank, world):
    """Or the comparison of losses could see nothing."""
    expected = losses_of(trainer_of("fsdp2"), rank, world)
    assert losses_of(trainer_of("floor"), rank, world)[-1] != pytest.approx(expected[-1], rel=1e-3)


@pytest.mark.parametrize("name", ["shardwise", "ddp", "floor"])
@on_ranks(2)
def test_bf16(rank, world, name):
    expected = losses_of(trainer_of("fsdp2", "bf16"), rank, world)
    found = losses_of(trainer_of(name, "bf16"), rank, world)
    if name != "floor":
        assert found == pytest.approx(expected, rel=5e-2)


def traffic_of(name, rank, world, micro):
    trainer = trainer_of(name, micro=micro)
    batches = (TINY.batches(rank, world) * 2)[:micro]
    trainer.step(batches)  # the first step differs: who is root is found out
    return trainer.traffic(lambda: trainer.step(batches))


@on_ranks(2)
def test_events_agree_with_collectives(rank, world):
    """What is read from layouts is what c10d moves."""
    from shardwise.bench.traffic import count_collectives

    trainer = trainer_of("shardwise:c10d")
    batches = TINY.batches(rank, world)
    trainer.step(batches)
    read = trainer.traffic(lambda: trainer.step(batches))
    seen = count_collectives(lambda: trainer.step(batches))
    assert (read.num_gathers, read.num_reduces) == (seen.num_gathers, seen.num_reduces)
    assert read.gather_bytes == pytest.approx(seen.gather_bytes, rel=0.01)
    assert read.reduce_bytes == pytest.approx(seen.reduce_bytes, rel=0.01)


@on_ranks(4)
def test_two_levels(rank, world):
    """Gathers between replicas once a step, reductions in two stages; the same model."""
    from shardwise.bench.traffic import count_collectives

    trainer = trainer_of("shardwise:hfsdp:c10d")
    expected = losses_of(trainer_of("shardwise:hsdp"), rank, world)
    assert losses_of(trainer, rank, world) == pytest.approx(expected, rel=1e-4)
    batches = TINY.batches(rank, world)
    read = trainer.traffic(lambda: trainer.step(batches))
    seen = count_collectives(lambda: trainer.step(batches))
    assert (read.num_gathers, read.num_reduces) == (seen.num_gathers, seen.num_reduces)
    once = traffic_of("shardwise:hfsdp:last", rank, world, 1).num_gathers // 3  # units: F, B, once
    assert read.num_gathers == once * (2 * len(batches) + 1)
    assert read.num_reduces == once * 2 * len(batches)


@on_ranks(2)
def test_two_replicas_and_sums_in_bf16_are_those_of_fsdp2(rank, world):
    """Replicas of one rank gather nothing over the cable; sums of half the bytes."""
    exact, narrow = (traffic_of(f"fsdp2{o}", rank, world, 1) for o in ("", ":reduce_bf16"))
    assert narrow.gather_bytes == exact.gather_bytes
    assert 2 * narrow.reduce_bytes == pytest.approx(exact.reduce_bytes)
    ours, theirs = (traffic_of(n, rank, world, 1) for n in ("shardwise:hsdp:c10d", "fsdp2:hybrid"))
    assert ours.gather_bytes == ours.reduce_bytes == 0
    assert ours.other_bytes == pytest.approx(theirs.other_bytes, rel=0.01)


@on_ranks(4)
def test_wire_formats_by_options(rank, world):
    exact, narrow, hosts = (
        traffic_of(f"shardwise:c10d{options}", rank, world, 1)
        for options in ("", ":gather_int8:reduce_bf16", ":by_hosts")
    )
    assert narrow.gather_bytes == pytest.approx(exact.gather_bytes * (1 + 4 / 128) / 4, rel=0.05)
    assert narrow.reduce_bytes == pytest.approx(exact.reduce_bytes / 2, rel=0.05)
    assert hosts.num_gathers == 2 * exact.num_gathers  # between hosts, then inside
    with pytest.raises(ConfigError, match="reduce_bf16 and reduce_int8 exclude each other"):
        parse_engine("shardwise:reduce_bf16:reduce_int8")


@on_ranks(2)
def test_one_gather_a_step_under_shard_grad_op(rank, world):
    """8 micro-batches: 2 units (the small blocks share one) are gathered once; FSDP2 gathers its 3
    in every forward and backward.
    """
    ours = traffic_of("shardwise:shard_grad_op", rank, world, 8)
    assert ours.num_gathers == 2
    assert ours.num_reduces == 2 * 8
    assert traffic_of("shardwise:shard_grad_op:last", rank, world, 8).num_reduces == 2
    assert traffic_of("fsdp2", rank, world, 8).num_gathers == (2 + 2 + 1) * 8
    best = traffic_of("fsdp2:keep:hold:last", rank, world, 8)
    assert (best.num_gathers, best.num_reduces) == (3, 3)


@on_ranks(2)
def test_collectives_of_c_plus_plus_are_seen(rank, world):
    """DDP's reducer all-reduces each gradient once: twice (W-1)/W of the model arrives."""
    num_params = sum(p.numel() for p in TINY.build().parameters())
    found = traffic_of("ddp", rank, world, 1)
    assert found.other_bytes == pytest.approx(4 * num_params, rel=0.01)
    assert traffic_of("floor", rank, world, 1).total_bytes == 0
