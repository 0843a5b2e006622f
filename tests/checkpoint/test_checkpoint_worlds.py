"""Saved by any world under any strategy, loaded by any other: the same bits, and absent stays
absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_kit import (
    make,
    newest,
    optimizer_of,
    same,
    shard,
    snapshot,
    spoiled,
    train,
)
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from ranks import on_ranks, run_ranks
from shardwise.errors import CheckpointError

SAVERS = [(1, "full_shard"), (2, "shard_grad_op"), (3, "full_shard"), (4, "hybrid_shard")]
SAVERS.append((4, "hybrid_full_optimizer"))
LOADERS = [(1, "no_shard"), (2, "full_shard"), (3, "shard_grad_op"), (4, "hybrid_full_optimizer")]


def save(rank: int, world: int, folder: Path, strategy: str, kind: str) -> dict[str, Any]:
    model = shard(make(), world, strategy)
    optimizer = optimizer_of(model, 0.02, kind)
    train(model, optimizer)
    manager = sw.CheckpointManager(folder / f"{world}-{strategy}-{kind}")
    manager.save(2, model, optimizer, extra={"position": 24, "who": ("a", None, float("inf"))})
    return snapshot(model, optimizer)


def load(
    rank: int, world: int, strategy: str, cases: list[tuple[Path, dict[str, Any], str]]
) -> None:
    for directory, expected, kind in cases:
        model = spoiled(shard(make(1), world, strategy))
        optimizer = optimizer_of(model, 0.5, kind)
        train(model, optimizer, 1)
        manager = sw.CheckpointManager(directory)
        checkpoint, skipped = manager.latest()
        assert checkpoint is not None and not skipped
        loaded = manager.load(checkpoint, model, optimizer)
        assert (loaded.step, loaded.rng_restored) == (2, checkpoint.world_size == world)
        assert loaded.extra == {"position": 24, "who": ("a", None, float("inf"))}
        same(snapshot(model, optimizer), expected, f"{directory.name} on {world} {strategy}")
        train(model, optimizer, 1)  # the engine has seen the writes: kept copies are fresh
    twin = shard(make(1), world, strategy)
    twin_optimizer = optimizer_of(twin, 0.5, kind)
    manager.load(checkpoint, twin, twin_optimizer)
    train(twin, twin_optimizer, 1)
    same(snapshot(model, optimizer), snapshot(twin, twin_optimizer), "after a step")


def test_every_world_reads_what_every_world_wrote(tmp_path: Path) -> None:
    cases = []
    for world, strategy in SAVERS:
        for kind in ("adamw", "sgd") if world == 3 else ("adamw",):
            expected = run_ranks(world, save, tmp_path, strategy, kind)[0]
            assert "optim.unused.exp_avg" not in expected
            cases.append((tmp_path / f"{world}-{strategy}-{kind}", expected, kind))
    for world, strategy in LOADERS:
        run_ranks(world, load, strategy, cases)


@on_ranks(3)
def test_optimizers_without_a_step_stay_without(rank: int, world: int, tmp_path: Path) -> None:
    model = shard(make(), world, "full_shard")
    optimizer = optimizer_of(model)
    manager = sw.CheckpointManager(tmp_path)
    manager.save(0, model, optimizer)
    checkpoint = newest(tmp_path)
    train(model, optimizer)
    manager.load(checkpoint, model, optimizer)
    assert not optimizer.state
    before = snapshot(model)
    same(before, {f"model.{n}": t.detach() for n, t in make().state_dict().items()})
    train(model, optimizer, 1)


@on_ranks(2)
def test_tied_weights_are_stored_once_and_replicas_are_shared_out(
    rank: int, world: int, tmp_path: Path
) -> None:
    for strategy in ("full_shard", "no_shard"):
        model = shard(make(), world, strategy)
        sw.CheckpointManager(tmp_path / strategy).save(1, model)
        path = newest(tmp_path / strategy).path
        files = [load_file(path / f"rank_{r:05d}.safetensors") for r in range(2)]
        names = [name for file in files for name in file]
        assert len(names) == len(set(names))
        assert not any("head.weight" in name for name in names)
        sizes = [sum(t.nbytes for n, t in f.items() if "rng" not in n) for f in files]
        assert max(sizes) < 0.75 * sum(sizes), sizes
        if strategy == "no_shard":  # whole tensors keep their names, for other tools
            together = {**files[0], **files[1]}
            assert torch.equal(together["model.embed.weight"], make().embed.weight)


@on_ranks(2)
def test_all_differences_come_in_one_report_and_change_nothing(
    rank: int, world: int, tmp_path: Path
) -> None:
    sw.CheckpointManager(tmp_path).save(1, shard(make(), world, "full_shard"))
    other = make(1)
    other.narrow = torch.nn.Linear(6, 2)
    other.added = torch.nn.Parameter(torch.ones(3))
    del other.unused
    other.frozen.data = other.frozen.data.double()
    model = shard(other, world, "full_shard")
    before = snapshot(model)
    manager = sw.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        manager.load(newest(tmp_path), model)
    text = str(caught.value)
    for part in (
        "missing from the checkpoint: added",
        "unknown to the model: unused",
        "of another shape: narrow.bias (1,) -> (2,), narrow.weight (1, 6) -> (2, 6)",
        "of another dtype: frozen torch.float32 -> torch.float64",
    ):
        assert part in text
    same(snapshot(model), before)


@on_ranks(2)
def test_an_untied_model_reads_a_tied_one_and_not_the_other_way(
    rank: int, world: int, tmp_path: Path
) -> None:
    tied, untied = make(), make(1)
    untied.head.weight = torch.nn.Parameter(torch.zeros(13, 6))
    manager = sw.CheckpointManager(tmp_path)
    manager.save(1, shard(tied, world, "full_shard"))
    model = shard(untied, world, "full_shard")
    manager.load(newest(tmp_path), model)
    found = snapshot(model)
    assert torch.equal(found["model.head.weight"], found["model.embed.weight"])
    manager.save(2, model)  # two equal tensors fit one
    target = shard(make(2), world, "full_shard")
    manager.load(newest(tmp_path), target)
    same(snapshot(target), found)
    with torch.no_grad():
        model.head.weight.add_(1)
    manager.save(3, model)
    with pytest.raises(CheckpointError, match=r"one tensor in the model, two.*head\.weight.*Untie"):
        manager.load(newest(tmp_path), target)


@on_ranks(2)
def test_groups_move_with_their_parameters(rank: int, world: int, tmp_path: Path) -> None:
    """Other groups, same options: fine. Groups whose parameters had different ones: refused."""
    model = shard(make(), world, "full_shard")
    optimizer = optimizer_of(model, 0.02)
    train(model, optimizer)
    manager = sw.CheckpointManager(tmp_path)
    manager.save(1, model, optimizer)
    expected = snapshot(model, optimizer)
    each = [{"params": [p]} for p in model.parameters() if p.requires_grad]
    single = torch.optim.AdamW(each, lr=1.0)
    manager.load(newest(tmp_path), model, single)
    same(snapshot(model, single), expected)
    merged = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with pytest.raises(CheckpointError, match="were in groups with different options"):
        manager.load(newest(tmp_path), model, merged)
    manager.load(newest(tmp_path), model, merged, options=False)
    assert merged.param_groups[0]["lr"] == 1.0
    few = torch.optim.AdamW(list(model.layers.parameters()), lr=1.0)
    with pytest.raises(CheckpointError, match=r"that the optimizer does not have.*embed.weight"):
        manager.load(newest(tmp_path), model, few)
    halves = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and p.ndim >= 2]),
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and p.ndim < 2]),
    ]
    manager.load(newest(tmp_path), model, halves)
    assert halves[0].param_groups[0]["weight_decay"] == 0.1
    manager.save(2, model, halves)
    manager.load(newest(tmp_path), model, optimizer)
    same(snapshot(model, optimizer), expected)


@on_ranks(2)
def test_schedule_and_random_state_go_on(rank: int, world: int, tmp_path: Path) -> None:
    def build() -> Iterator[Any]:
        model = shard(make(), world, "full_shard")
        optimizer = optimizer_of(model)
        yield from (model, optimizer)
        yield torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.1)

    model, optimizer, scheduler = build()
    torch.manual_seed(rank)
    train(model, optimizer)
    scheduler.step()
    manager = sw.CheckpointManager(tmp_path)
    manager.save(2, model, optimizer, scheduler=scheduler)
    expected_draw = torch.rand(3)
    other, other_optimizer, other_scheduler = build()
    manager.load(newest(tmp_path), other, other_optimizer, scheduler=other_scheduler)
    assert torch.equal(torch.rand(3), expected_draw)
    for _ in range(3):
        scheduler.step()
        other_scheduler.step()
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    manager.save(3, other, other_optimizer)
    with pytest.raises(CheckpointError, match="holds no scheduler"):
        manager.load(newest(tmp_path), other, other_optimizer, scheduler=other_scheduler)


@on_ranks(2)
def test_background_saves_show_the_moment_of_the_call(
    rank: int, world: int, tmp_path: Path
) -> None:
    model = shard(make(), world, "full_shard")
    optimizer = optimizer_of(model)
    train(model, optimizer)
    manager = sw.CheckpointManager(tmp_path, background=True, keep=1)
    expected = snapshot(model, optimizer)
    manager.save(1, model, optimizer)
    train(model, optimizer)
    manager.wait()
    target = shard(make(1), world, "full_shard")
    fresh = optimizer_of(target)
    manager.load(newest(tmp_path), target, fresh)
    same(snapshot(target, fresh), expected)
    manager.save(2, model, optimizer)
    manager.close()
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


@on_ranks(2)
def test_what_cannot_be_saved_is_named_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    model = shard(make(), world, "full_shard")
    manager = sw.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"extra\.a\[1\]: a builtins\.object cannot be saved"):
        manager.save(1, model, extra={"a": [1, object()]})
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
    with pytest.raises(
        CheckpointError, match=r"group 0 holds a tensor .* no parameter of the model"
    ):
        manager.save(1, model, stranger)
    blocked = tmp_path / "file"
    if rank == 0:
        blocked.touch()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step 1 could not be .*earlier checkpoints"):
        sw.CheckpointManager(blocked / "below").save(1, model)
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@on_ranks(4)
def test_both_mesh_dims_can_cut_one_dim(rank: int, world: int, tmp_path: Path) -> None:
    """What FSDP over tensor parallelism has: the box follows the order of the cuts."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plain = torch.arange(77.0).reshape(11, 7)
    for placements in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))):
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(distribute_tensor(plain, mesh, placements))
        manager = sw.CheckpointManager(tmp_path / str(placements))
        manager.save(1, module)
        for back in ((Shard(1), Shard(1)), (Shard(0), Replicate())):
            other = torch.nn.Module()
            other.w = torch.nn.Parameter(distribute_tensor(torch.zeros(11, 7), mesh, back))
            manager.load(newest(tmp_path / str(placements)), other)
            assert torch.equal(other.w.full_tensor(), plain)
