"""`hybrid_full_optimizer`: replicas share out what they would hold twice.

Numbers are those of `hybrid_shard` to the bit (2 replicas: one addition, which is commutative);
the shards that wait for use are gathered over the replicate axis once per write, whatever follows.
Parity with a plain model, accumulation, writes, clipping, checkpoints and reproducible runs are
tested beside the other strategies.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from engine_kit import (
    MODELS,
    OPTIMIZERS,
    TRANSPORTS,
    Blocks,
    Mlp,
    Setting,
    Uneven,
    batch,
    full,
    grid,
    line,
    local,
    loss_of,
    make,
    part,
    same_weights,
    weights_of,
)
from mesh_kit import Ffn, named_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from ranks import on_ranks
from shardwise.comm.choose import open_transport
from shardwise.engine.core.state import units_in
from shardwise.engine.mesh import axes
from shardwise.engine.services.inspect import gathered_bytes

BF16 = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = ["(root)", "layers.0", "layers.1", "layers.2"]


def shard(model: Any, transport: str, strategy: str = "hybrid_full_optimizer", **more: Any) -> Any:
    return Setting(strategy, transport).shard(model, 4, **more)


def step(model: Any, opt: torch.optim.Optimizer, number: int, rank: int, micro: int = 1) -> None:
    for i in range(micro):
        (loss_of(model(batch(model, number * 10 + i, rank))) / micro).backward()
    opt.step()
    opt.zero_grad()


def refreshed(model: Any, work: Callable[[], object]) -> list[str]:
    """The units whose shards were gathered from the replicas meanwhile."""
    with sw.record_events(model) as log:
        work()
    return sorted(e.unit for e in log.codes("HG"))


# -- how it lies ---------------------------------------------------------------------------------
@on_ranks(4)
def test_rows_of_a_rank_are_a_part_of_its_shards_rows(rank: int, world: int) -> None:
    plain = make(Uneven)
    model = shard(copy.deepcopy(plain), "c10d")
    mesh = grid(2, 2)
    replica, shard_rank = mesh.get_local_rank(0), mesh.get_local_rank(1)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        rows = q.detach().tensor_split([-(-q.shape[0] // 2)])[shard_rank]
        chunk = -(-rows.shape[0] // 2)
        own = rows[replica * chunk :][:chunk]
        assert torch.equal(local(p), own), name
        assert torch.equal(local(p), part(q.detach(), p)), name
        assert p.placements[0].split_factor == 2 and p.placements[1] == Shard(0)
        assert torch.equal(p.full_tensor(), q), name
        assert p.device_mesh == mesh


@on_ranks(4)
def test_memory_is_what_the_layout_says(rank: int, world: int) -> None:
    """A quarter of parameters, gradients and moments, half of the copy that waits for use."""
    for transport in TRANSPORTS:
        model = shard(nn.Sequential(nn.Linear(64, 64, bias=False)), transport, mp_policy=BF16)
        opt = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        opt.step()
        (p,) = model.parameters()
        numel = 64 * 64
        assert local(p).numel() == local(p.grad).numel() == numel // 4
        assert opt.state[p]["exp_avg"].to_local().numel() == numel // 4
        (bucket,) = units_in(model)[-1].buckets
        assert bucket.home.bucket.buffer.nbytes == numel // 4 * 4
        assert bucket.bucket.buffer.nbytes == numel // 2 * 2, "bf16, half of the rows"
        assert bucket.bucket.buffer.dtype == torch.bfloat16
        assert gathered_bytes(model) == 0


# -- numbers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["plain", "bf16", "recomputed", "accumulated"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_bits_are_those_of_hybrid_shard(transport: str, how: str, rank: int, world: int) -> None:
    options: dict[str, Any] = {"mp_policy": BF16} if how == "bf16" else {}
    for cls in MODELS if how != "bf16" else MODELS[:3]:  # torch's BatchNorm takes no bf16 there
        found = []
        for strategy in ("hybrid_shard", "hfsdp"):
            mesh = grid(2, 2)
            model = sw.shard_model(
                make(cls),
                mesh=mesh,
                strategy=strategy,
                transport=transport,
                unit=["Linear" if cls is Mlp else "Block" if cls is Blocks else "Sequential"],
                activation_checkpointing=how == "recomputed",
                **options,
            )
            opt = OPTIMIZERS["adamw"](model.parameters())
            for number in range(3):
                step(model, opt, number, rank, micro=3 if how == "accumulated" else 1)
            found.append(weights_of(model))
        for name, want in found[0].items():
            assert torch.equal(found[1][name], want), f"{cls.__name__} {name}"


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)], ids=str)
@on_ranks(4)
def test_an_axis_of_one_rank(shape: tuple[int, int], rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        models = []
        for strategy, mesh in (("full_shard", line(world)), ("hfsdp", grid(*shape))):
            model = make(Uneven)
            for unit in [*model.layers, model]:
                sw.fully_shard(unit, mesh=mesh, strategy=strategy, transport=transport)
            opt = OPTIMIZERS["adamw"](model.parameters())
            for number in range(2):
                step(model, opt, number, rank)
            models.append(model)
        same_weights(models[1], weights_of(models[0]), f"{shape} {transport}", exact=False)
        (bucket,) = units_in(models[1])[-1].buckets
        assert (bucket.home is None) == (shape == (1, 4))


class Experts(nn.Module):
    """Replicas run different units, which the other ones learn of at the end of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.head(self.layers[which](x)).square().mean()


@on_ranks(4)
def test_replicas_that_run_different_units(rank: int, world: int) -> None:
    for by in (lambda r: r // 2, lambda r: r % 2):
        model, plain = shard(make(Experts), "shared_memory"), make(Experts)
        model(torch.ones(3, 5) * rank, by(rank)).backward()
        for r in range(world):
            (plain(torch.ones(3, 5) * r, by(r)) / world).backward()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            want = q[1].grad
            assert (p.grad is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(full(p.grad), want, msg=name)


class Gated(nn.Module):
    """One unit with a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.some = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gate: bool) -> torch.Tensor:
        x = self.always(x)
        return (self.some(x) if gate else x).square().mean()


@on_ranks(4)
def test_parameters_that_some_ranks_use(rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        for users in ({0}, {3}, {0, 1}, {1, 3}):
            model, plain = shard(make(Gated), transport), make(Gated)
            model(torch.ones(2, 4) * rank, rank in users).backward()
            for r in range(world):
                (plain(torch.ones(2, 4) * r, r in users) / world).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if q.grad is not None:
                    torch.testing.assert_close(full(p.grad), q.grad)


# -- once per write ------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_one_gather_over_the_replicas_per_step(transport: str, rank: int, world: int) -> None:
    model = shard(make(Mlp), transport)
    opt = OPTIMIZERS["adamw"](model.parameters())
    for number in range(3):
        with sw.record_events(model) as log:
            step(model, opt, number, rank, micro=8)
        assert sorted(e.code for e in log.codes("HG", "AG")) == ["AG"] * 64 + ["HG"] * 4
        first = [e.code for e in log.events][:4]
        assert first == ["HG"] * 4, "before anything runs, so that a fence can follow"
        assert len(log.codes("RS")) == 32


@on_ranks(4)
def test_collectives_over_the_replicate_axis(rank: int, world: int) -> None:
    """What is issued on c10d: one all-gather a unit and step, and no all-reduce of gradients."""
    calls: list[tuple[str, int]] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    scatter = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    replicas = dist.get_process_group_ranks(grid(2, 2).get_group(0))
    model = shard(make(Mlp), "c10d")
    opt = OPTIMIZERS["adamw"](model.parameters())
    step(model, opt, 0, rank)
    originals = {n: getattr(dist, n) for n in (name, scatter)}

    def counted(of: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any, **more: Any) -> Any:
            calls.append((of, dist.get_process_group_ranks(group) == replicas))
            return originals[of](*args, group=group, **more)

        return call

    for n in originals:
        setattr(dist, n, counted(n))
    try:
        step(model, opt, 1, rank, micro=8)
    finally:
        for n, original in originals.items():
            setattr(dist, n, original)
    assert calls.count((name, True)) == 4
    assert calls.count((name, False)) == 64
    assert calls.count((scatter, True)) == calls.count((scatter, False)) == 32


@on_ranks(4)
def test_what_was_written_is_gathered_again_and_nothing_else(rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        model = shard(make(Uneven), transport)
        state = {n: t.clone() for n, t in make(Uneven, 1).state_dict().items()}
        x = batch(Uneven, 0, rank)
        opt = OPTIMIZERS["sgd"](model.layers[1].parameters())

        def forward(model: Any = model, x: torch.Tensor = x) -> torch.Tensor:
            with torch.no_grad():
                return model(x)

        assert refreshed(model, forward) == UNITS
        assert refreshed(model, forward) == []
        loss_of(model(x)).backward()
        assert refreshed(model, forward) == []
        opt.step()
        assert refreshed(model, forward) == ["layers.1"]
        if rank == 2:  # one rank's write is everybody's
            with torch.no_grad():
                model.gain.mul_(2.0)
        assert refreshed(model, forward) == ["(root)"]
        model.load_state_dict(state)
        assert refreshed(model, forward) == UNITS
        assert torch.equal(forward(), make(Uneven, 1)(x))
        model.layers[0][0].weight.data.zero_()
        assert refreshed(model, forward) == ["layers.0"]
        if rank == 0:
            model.layers[2][0].weight.to_local().data.zero_()
        sw.mark_dirty(model.layers[2])
        assert refreshed(model, forward) == ["layers.2"]


@on_ranks(4)
def test_nobody_reads_a_shard_before_a_slow_rank_has_filled_it(rank: int, world: int) -> None:
    model, plain = shard(make(Mlp), "shared_memory"), make(Mlp)
    x = batch(Mlp, 0, rank)
    if rank == 1:
        for home in [b.home for u in units_in(model) for b in u.buckets if b.home is not None]:
            home.fill = functools.partial(late, home.fill)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
            for m in (model, plain):
                for p in m.parameters():
                    p.mul_(0.9)


def late(fill: Callable[[Any], Any], middle: Any) -> Any:
    time.sleep(0.2)
    return fill(middle)


@on_ranks(4)
def test_user_unshard_sees_writes(rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        model = shard(make(Mlp), transport)
        for value in (3.0, 5.0):
            with torch.no_grad():
                model.layers[0].weight.fill_(value)
            model.layers[0].unshard()
            assert torch.equal(model.layers[0].weight, torch.full((8, 8), value))
            model.layers[0].reshard()
        for (name, whole), want in zip(
            sw.full_parameters(model), weights_of(model).values(), strict=True
        ):
            assert torch.equal(whole, want), name


@on_ranks(4)
def test_a_model_inside_another_ones_forward(rank: int, world: int) -> None:
    """Its shards are gathered while a phase is open; nobody reads them half written."""
    for transport in TRANSPORTS:
        inner, outer = shard(make(Mlp), transport), shard(make(Mlp, 1), transport)
        plain_inner, plain_outer = make(Mlp), make(Mlp, 1)
        outer.layers[1].register_forward_pre_hook(lambda _, args, m=inner: (m(*args),))
        plain_outer.layers[1].register_forward_pre_hook(lambda _, args, m=plain_inner: (m(*args),))
        for number in range(3):
            x = batch(Mlp, number, rank)
            with torch.no_grad():
                assert torch.equal(outer(x), plain_outer(x)), f"{transport} {number}"
                for m in (inner, outer, plain_inner, plain_outer):
                    for p in m.parameters():
                        p.mul_(0.9)


@on_ranks(4)
def test_an_exception_in_between_does_no_harm(rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        models = [shard(make(Mlp), transport) for _ in range(2)]
        opts = [OPTIMIZERS["adamw"](m.parameters()) for m in models]
        for number in range(3):
            if number == 1:
                handle = models[0].layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    models[0](batch(Mlp, 9, rank))
                handle.remove()
            for model, opt in zip(models, opts, strict=True):
                step(model, opt, number, rank)
        same_weights(models[0], weights_of(models[1]), transport)


@on_ranks(4)
def test_a_tool_that_watches_changes_no_bit(rank: int, world: int) -> None:
    models = [shard(make(Mlp), "shared_memory") for _ in range(2)]
    opts = [OPTIMIZERS["adamw"](m.parameters()) for m in models]
    for number in range(3):
        step(models[0], opts[0], number, rank)
        if number == 1:
            with CommDebugMode() as counter:
                step(models[1], opts[1], number, rank)
            assert counter.get_total_counts() > 0
        else:
            step(models[1], opts[1], number, rank)
    same_weights(models[0], weights_of(models[1]), "watched", exact=False)


# -- surroundings --------------------------------------------------------------------------------
@on_ranks(4)
def test_copies_train_on_their_own(rank: int, world: int) -> None:
    for transport in TRANSPORTS:
        model = shard(make(Uneven), transport)
        twin = copy.deepcopy(model)
        for m in (model, twin):
            step(m, OPTIMIZERS["adamw"](m.parameters()), 0, rank)
        same_weights(twin, weights_of(model), transport)
        before = weights_of(model)
        step(twin, OPTIMIZERS["sgd"](twin.parameters()), 1, rank)
        same_weights(model, before, transport)
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            assert p.placements == q.placements


@on_ranks(4)
def test_dcp_to_another_strategy_and_back(rank: int, world: int, tmp_path: Any) -> None:
    model = shard(make(Uneven), "c10d")
    opt = OPTIMIZERS["adamw"](model.parameters())
    step(model, opt, 0, rank)
    want = weights_of(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "a")
    flat = Setting("full_shard").shard(make(Uneven, 1), world)
    dcp.load({"model": flat.state_dict()}, checkpoint_id=tmp_path / "a")
    sw.mark_dirty(flat)
    same_weights(flat, want, "into full_shard")
    dcp.save({"model": flat.state_dict()}, checkpoint_id=tmp_path / "b")
    again = shard(make(Uneven, 2), "c10d")
    again(batch(Uneven, 0, rank))
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "b")
    again.load_state_dict(state["model"])
    same_weights(again, want, "and back")
    with torch.no_grad():
        assert torch.equal(again(batch(Uneven, 0, rank)), model(batch(Uneven, 0, rank)))


@on_ranks(4)
def test_beside_tensor_parallelism(rank: int, world: int) -> None:
    """On a dim that tensor parallelism does not cut; one that it cuts is refused by name."""
    mesh = named_mesh(replicate=2, shard=1, tensor=2)
    data, tensor = mesh["replicate", "shard"], mesh["tensor"]

    def made(plan: dict[str, Any]) -> Any:
        return parallelize_module(make(lambda: Ffn(4, 8)), tensor, plan)

    rows = made({"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    with pytest.raises(NotImplementedError, match=r"up\.weight: its dim 0 is cut over"):
        sw.fully_shard(rows, mesh=data, strategy="hfsdp", transport="c10d")
    model, plain = (
        made({"down": RowwiseParallel(input_layouts=Replicate())}),
        make(lambda: Ffn(4, 8)),
    )
    sw.fully_shard(model, mesh=data, strategy="hfsdp", transport="c10d")
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    x = torch.arange(24.0).view(6, 4).sin()
    for _ in range(2):
        for m, opt in zip((model, plain), opts, strict=True):
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach())


@on_ranks(4)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="hybrid_full_optimizer needs a mesh of 2 dims"):
        sw.fully_shard(make(Mlp), mesh=line(world), strategy="hfsdp")
    mesh = grid(2, 2)
    dims = sw.DataParallelMeshDims(shard="shard", replicate="replicate")
    with pytest.raises(NotImplementedError, match="hybrid_full_optimizer with dp_mesh_dims"):
        sw.fully_shard(make(Mlp), mesh=mesh, strategy="hfsdp", dp_mesh_dims=dims)
    roles = axes.resolve_mesh(mesh, axes.strategy_named("hybrid_shard"))
    transport = open_transport("c10d", roles.shard, roles.replicate, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="moves shards over two meshes"):
        sw.fully_shard(make(Mlp), mesh=mesh, strategy="hfsdp", transport=transport)
