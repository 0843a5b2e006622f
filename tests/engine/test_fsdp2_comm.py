"""What goes over the wire: exact counts of collectives, in tools that users have.

Counting sees c10d's operators. Under "auto" the ranks of these tests share memory, and step over to
process groups while somebody counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_kit import (
    ENGINES,
    OURS,
    TwoLayer,
    both,
    fs,
    inputs,
    mean_gradients,
    mesh_of,
    same_parts,
    shard_tower,
    shows_shards,
    tower,
    train,
)
from torch.distributed.tensor.debug import CommDebugMode

from ranks import on_ranks

c10d = torch.ops.c10d
KINDS = {"gather": "_allgather_base_", "scatter": "_reduce_scatter_base_", "sum": "allreduce_"}


class Counted(CommDebugMode):
    """Collectives that were issued inside, and nothing else beside them."""

    def counts(self) -> tuple[int, int, int]:
        found = {op._overloadpacket if hasattr(op, "_overloadpacket") else op: n
                 for op, n in self.get_comm_counts().items()}  # fmt: skip
        wanted = [getattr(c10d, name) for name in KINDS.values()]
        assert sum(found.values()) == sum(found.get(op, 0) for op in wanted), found
        gathers, scatters, sums = (found.get(op, 0) for op in wanted)
        return gathers, scatters, sums


def count_step(model: nn.Module, rank: int, step: int = 0) -> list[tuple[int, int, int]]:
    """Counts of a forward and of its backward."""
    with Counted() as forward:
        loss = model(inputs(rank, step)).sum()
    with Counted() as backward:
        loss.backward()
    return [forward.counts(), backward.counts()]


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_one_gather_a_unit_and_pass(engine: str, rank: int, world: int) -> None:
    """Blocks and the root, whose own bias-like parameter is its unit."""
    for reshard, backward_gathers in ((True, 4), (None, 3), (False, 0)):
        model = tower(3, gain=True)
        shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=reshard)
        for step in range(2):
            forward, backward = count_step(model, rank, step)
            assert forward == (4, 0, 0), f"{reshard}: {forward}"
            assert backward == (backward_gathers, 4, 0), f"{reshard}: {backward}"


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_resharding_by_hand_costs_a_gather_in_backward(engine: str, rank: int, world: int) -> None:
    model = shard_tower(engine, tower(3), mesh=mesh_of(world), reshard_after_forward=False)
    loss = model(inputs(rank)).sum()
    for block in model:
        block.reshard()
    with Counted() as backward:
        loss.backward()
    assert backward.counts() == (3, 3, 0)


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_reshard_after_forward_can_be_changed(
    engine: str, recurse: bool, rank: int, world: int
) -> None:
    model = tower(3, gain=True)
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=recurse)
    forward, backward = count_step(model, rank)
    assert forward == (4, 0, 0)
    assert backward == ((0 if recurse else 3), 4, 0)
    model.set_reshard_after_forward(True, recurse=recurse)
    assert count_step(model, rank, 1) == [(4, 0, 0), (4, 4, 0)]


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(4)
def test_replicas_add_one_sum_a_unit(engine: str, rank: int, world: int) -> None:
    model = shard_tower(engine, tower(3), mesh=mesh_of(2, 2))
    assert count_step(model, rank) == [(3, 0, 0), (3, 3, 3)]


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(4)
def test_accumulation_skips_exactly_what_it_says(engine: str, rank: int, world: int) -> None:
    for mesh, recurse in (((4,), True), ((4,), False), ((2, 2), True), ((2, 2), False)):
        sums = len(mesh) - 1
        model = tower(3, gain=True)
        shard_tower(engine, model, mesh=mesh_of(*mesh), reshard_after_forward=True)
        quiet = 4 if recurse else 1  # units that the setting reaches
        model.set_requires_gradient_sync(False, recurse=recurse)
        _, backward = count_step(model, rank)
        assert backward == (4, 4 - quiet, sums * (4 - quiet))
        model.set_requires_gradient_sync(True, recurse=recurse)
        if sums:
            model.set_requires_all_reduce(False, recurse=recurse)
            _, backward = count_step(model, rank)
            assert backward == (4, 4, 4 - quiet)
            model.set_requires_all_reduce(True, recurse=recurse)
        _, backward = count_step(model, rank)
        assert backward == (4, 4, sums * 4)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_frozen_units_are_gathered_and_not_reduced(engine: str, rank: int, world: int) -> None:
    model = tower(3)
    model[1].requires_grad_(False)
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    assert count_step(model, rank) == [(3, 0, 0), (3, 2, 0)]


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_bytes_of_a_half_frozen_unit(engine: str, rank: int, world: int) -> None:
    """Only what trains is reduced."""
    model = TwoLayer(8, 4, bias=False)
    model.up.requires_grad_(False)
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    seen: list[int] = []
    original = dist.reduce_scatter_single

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[0] if args else kwargs["output"]).numel())
        return original(*args, **kwargs)

    dist.reduce_scatter_single = noting
    try:
        model(inputs(rank)).sum().backward()
    finally:
        dist.reduce_scatter_single = original
    assert len(seen) == 1
    trainable = model.down.weight.numel() // world
    assert trainable <= seen[0] <= trainable + 8  # the count of ranks with a gradient rides along


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(1, 2)
def test_a_mesh_of_one_rank_is_silent(engine: str, rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "mine"))["mine"]
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh)
    assert count_step(model, rank) == [(0, 0, 0), (0, 0, 0)]
    plain(inputs(rank)).sum().backward()
    same_parts(model, plain)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_replaced_functions_are_called(engine: str, rank: int, world: int) -> None:
    """Patching torch.distributed is how tools count, delay and assert."""
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    calls: list[tuple[str, torch.dtype]] = []
    originals = {n: getattr(dist, n) for n in ("all_gather_single", "reduce_scatter_single")}

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = args[0] if args else kwargs.get("output", kwargs.get("output_tensor"))
            calls.append((name, out.dtype))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, noting(name))
    try:
        model(inputs(rank)).sum().backward()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert [n for n, _ in calls].count("all_gather_single") == 6
    assert [c for c in calls if c[0] == "reduce_scatter_single"] == [
        ("reduce_scatter_single", torch.float32)
    ] * 3
    plain(inputs(rank)).sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_one_rank_that_counts_is_enough(engine: str, rank: int, world: int) -> None:
    """A tool on one rank alone neither hangs the others nor sees nothing."""
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    for step in range(3):
        counted = Counted()
        if rank == 1 and step == 1:
            with counted:
                model(inputs(rank, step)).sum().backward()
            assert counted.counts() == (6, 3, 0)
        else:
            model(inputs(rank, step)).sum().backward()
        plain(inputs(rank, step)).sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_counting_in_the_middle_of_training_changes_no_bit(
    engine: str, rank: int, world: int
) -> None:
    ends = []
    for counts in (False, True):
        model = shard_tower(engine, tower(3), mesh=mesh_of(world))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if counts and step % 2:
                with Counted():
                    model(inputs(rank, step)).square().sum().backward()
            else:
                model(inputs(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_unshard_ahead(engine: str, rank: int, world: int) -> None:
    """Handles, modules without parameters of their own, and before any forward."""
    for is_async in (True, False):
        model, plain = both(tower(2))
        shard_tower(engine, model, mesh=mesh_of(world))
        handle = model[0].unshard(async_op=is_async)
        if is_async:
            handle.wait()
        assert not shows_shards(model[0])
        for p, q in zip(model[0].parameters(), plain[0].parameters(), strict=True):
            assert torch.equal(p, q)
        handle = model.unshard(async_op=is_async)  # owns nothing itself
        if is_async:
            handle.wait()
        model[0].reshard()
        assert shows_shards(model[0])
        train(model, plain, rank, steps=2)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_unshard_inside_of_forward(engine: str, rank: int, world: int) -> None:
    class Ahead(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            blocks = list(self)
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                if hasattr(following, "unshard"):
                    following.unshard(async_op=True)
                x = block(x)
            return x

    torch.manual_seed(0)
    model, plain = both(Ahead(*(TwoLayer() for _ in range(4))))
    shard_tower(engine, model, mesh=mesh_of(world))
    train(model, plain, rank)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_prefetching_changes_no_number(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(4))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    for i in range(3):
        model[i].set_modules_to_forward_prefetch([model[i + 1]])
        model[3 - i].set_modules_to_backward_prefetch([model[2 - i]])
    model[1].set_modules_to_backward_prefetch([model[3]])  # whose backward is over by then
    train(model, plain, rank, steps=3)
    assert all(shows_shards(block) for block in model)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_knobs_that_change_no_number(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world))
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_post_optim_event(None) if engine != "torch" else None
    model.set_is_last_backward(True)
    train(model, plain, rank, steps=3)


@pytest.mark.parametrize("engine", OURS)  # torch's needs an operation that Gloo lacks
@on_ranks(2)
def test_divide_factor(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    for block in (*model, model):
        block.set_gradient_divide_factor(float(4 * world))
    model(inputs(rank)).sum().backward()
    (plain(inputs(rank)).sum() / 4).backward()
    mean_gradients(plain)
    same_parts(model, plain)
