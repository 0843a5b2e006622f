"""Parameters that are DTensors on the tensor dim already: FSDP2's placements and bits, the plain
model's numbers, and all that users do with them.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from engine_kit import (
    OPTIMIZERS,
    TRANSPORTS,
    Plain,
    all_agree,
    batch,
    full,
    local,
    loss_of,
    make,
)
from mesh_kit import (
    Ffn,
    Stack,
    named_mesh,
    pairs,
    same_as_torch,
    shard_layers,
    stack,
    torch_fully_shard,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

import shardwise as sw
from ranks import on_ranks
from shardwise._torch_compat import is_strided_shard
from shardwise.engine.mesh.spread import part_of


def close(got: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(
        full(got), full(want), rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}"
    )


def grid(world: int) -> Any:
    return named_mesh(dp=world // 2, tp=2)


def train(model: Any, optimizer: Any, steps: int, data_rank: int) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        loss = loss_of(model(batch(Stack, step, data_rank)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# -- beside torch --------------------------------------------------------------------------------
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("hidden", [8, 17])
@on_ranks(2, 4, timeout_s=180)
def test_the_same_bits_as_torch(rank: int, world: int, transport: str, hidden: int) -> None:
    mesh = grid(world)
    how = transport if world > 2 else "auto"
    ours = shard_layers(sw.fully_shard, stack(mesh["tp"], hidden), mesh=mesh["dp"], transport=how)
    theirs = shard_layers(torch_fully_shard, stack(mesh["tp"], hidden), mesh=mesh["dp"])
    same_as_torch(ours, theirs, "at first")
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (ours, theirs)]
    for step in range(2):
        losses = [loss_of(m(batch(Stack, step, rank // 2))) for m in (ours, theirs)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        same_as_torch(ours, theirs, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_as_torch(ours, theirs, "at last")


@on_ranks(4)
def test_placements_on_the_parent_mesh(rank: int, world: int) -> None:
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"], 8), mesh=mesh["dp"])
    ffn = model.layers[0]
    strided, inner = ffn.up.weight.placements
    assert is_strided_shard(strided) and strided.split_factor == 2 and strided.dim == 0
    assert inner == Shard(0)
    assert ffn.down.weight.placements == (Shard(0), Shard(1))
    assert ffn.down.bias.placements == (Shard(0), Replicate())
    assert model.norm.weight.placements == (Shard(0),)
    assert ffn.up.weight.device_mesh == mesh and ffn.up.weight.shape == (8, 3)


@on_ranks(4)
def test_modules_hold_tensor_parallel_parameters(rank: int, world: int) -> None:
    mesh = grid(world)
    seen: list[Any] = []

    class Looks(Ffn):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend([self.up.weight, self.down.weight])
            return super().forward(x)

    model: Any = nn.Module()
    model.layers = nn.ModuleList([make(lambda: Looks(3, 17))])
    from mesh_kit import parallel

    layer = parallel(model, mesh["tp"]).layers[0]
    sw.fully_shard(layer, mesh=mesh["dp"])
    layer(torch.ones(2, 3)).sum().backward()
    up, down = seen
    assert type(up) is nn.Parameter or isinstance(up, DTensor)
    assert up.placements == (Shard(0),) and down.placements == (Shard(1),)
    assert up.device_mesh == mesh["tp"]
    part = -(-17 // 2) if rank % 2 == 0 else 17 // 2
    for tensor, shape in ((up, (part, 3)), (down, (3, part))):
        assert tuple(tensor._local_tensor.shape) == shape and tensor._local_tensor.is_contiguous()


# -- beside the plain model ----------------------------------------------------------------------
OPTIONS: dict[str, dict[str, Any]] = {
    "c10d": {"transport": "c10d"},
    "kept": {"reshard_after_forward": False},
    "half": {"reshard_after_forward": 2},
    "zero2": {"strategy": "shard_grad_op"},
    "zero1": {"strategy": "shard_optimizer", "transport": "c10d"},
    "ddp": {"strategy": "no_shard"},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
}


@pytest.mark.parametrize("name", list(OPTIONS))
@on_ranks(4, timeout_s=120)
def test_gradients_of_the_plain_model(rank: int, world: int, name: str) -> None:
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"], **OPTIONS[name])
    oracle = Plain(make(Stack), 2)
    for n, p, q in pairs(model, oracle.model):
        assert torch.equal(full(p), q.detach()), n
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (model, oracle.model)]
    for step in range(2):
        loss_of(model(batch(Stack, step, rank // 2))).backward()
        oracle.step(step)
        for n, p, q in pairs(model, oracle.model):
            close(p.grad, q.grad, f"{name}, step {step}: {n}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4, timeout_s=120)
def test_fewer_rows_than_tensor_ranks(rank: int, world: int) -> None:
    """hidden = 1: the second tensor rank has no row at all (torch's own fails here)."""
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"], 1), mesh=mesh["dp"])
    oracle = Plain(make(lambda: Stack(1)), 2)
    loss_of(model(batch(Stack, 0, rank // 2))).backward()
    oracle.step(0)
    for n, p, q in pairs(model, oracle.model):
        close(p, q, n)
        close(p.grad, q.grad, f"gradient of {n}")


@pytest.mark.slow
@on_ranks(8, timeout_s=280)
def test_hybrid_with_tensor_parallel(rank: int, world: int) -> None:
    mesh = named_mesh(replicate=2, shard=2, tp=2)
    data = mesh["replicate", "shard"]
    ours = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=data)
    theirs = shard_layers(torch_fully_shard, stack(mesh["tp"]), mesh=data)
    for model in (ours, theirs):
        loss_of(model(batch(Stack, 0, rank // 2))).backward()
    same_as_torch(ours, theirs, "hybrid", exact=False)
    for (n, p), q in zip(ours.state_dict().items(), make(Stack).state_dict().values(), strict=True):
        assert torch.equal(full(p), q), n


# -- gradients that lie otherwise ----------------------------------------------------------------
class Raw(nn.Module):
    """A parameter that is sharded over the tensor axis and used by hand."""

    def __init__(self, mesh: Any, placement: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [placement]))

    def forward(self, arriving: Any) -> torch.Tensor:
        weight = self.weight
        weight.register_hook(lambda g: g.redistribute(placements=[arriving])) if isinstance(
            arriving, Replicate
        ) else None
        if isinstance(arriving, Partial):
            return weight.to_local(grad_placements=[Partial()]).square().sum() / 2
        return weight.square().sum().full_tensor()


@pytest.mark.parametrize("kind", ["replicate", "partial"])
@on_ranks(4)
def test_gradients_are_brought_to_the_parameters_placement(
    rank: int, world: int, kind: str
) -> None:
    mesh = grid(world)
    placement = Shard(1) if kind == "replicate" else Replicate()
    arriving = Replicate() if kind == "replicate" else Partial()
    model = Raw(mesh["tp"], placement)
    before = model.weight.detach().full_tensor()
    sw.fully_shard(model, mesh=mesh["dp"])
    model(arriving).backward()
    grad: Any = model.weight.grad
    assert grad.placements == (Shard(0), placement)
    close(grad, 2 * before, kind)


# -- what users do -------------------------------------------------------------------------------
@on_ranks(4, timeout_s=120)
def test_checkpoint_round_trip(rank: int, world: int, tmp_path: Any) -> None:
    mesh = grid(world)

    def build() -> tuple[Any, Any]:
        model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"])
        return model, OPTIMIZERS["adamw"](model.parameters())

    model, optimizer = build()
    train(model, optimizer, 2, rank // 2)
    weights, moments = get_state_dict(model, optimizer)
    where = str(tmp_path / "checkpoint")
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=where)
    other, other_optimizer = build()
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=where)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for n, p, q in pairs(other, model):
        assert torch.equal(local(p), local(q)), n
    a, b = (train(m, o, 2, rank // 2) for m, o in ((model, optimizer), (other, other_optimizer)))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks(4)
def test_clipping_over_mixed_meshes(rank: int, world: int, norm_type: float) -> None:
    mesh = grid(world)
    for clip in (sw.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"])
        oracle = Plain(make(Stack), 2)
        loss_of(model(batch(Stack, 0, rank // 2))).backward()
        oracle.step(0)
        norm = clip(model.parameters(), 0.01, norm_type)
        assert all_agree(full(norm))
        wanted = torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.01, norm_type)
        close(norm, wanted, f"norm {norm_type} of {clip.__module__}")
        for n, p, q in pairs(model, oracle.model):
            close(p.grad, q.grad, n)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(4)
def test_optimizers(rank: int, world: int, fused: bool) -> None:
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"])
    oracle = Plain(make(Stack), 2)
    kind: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    optimizers = [
        torch.optim.AdamW(m.parameters(), 0.01, eps=1e-4, **kind) for m in (model, oracle.model)
    ]
    for step in range(2):
        loss_of(model(batch(Stack, step, rank // 2))).backward()
        oracle.step(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for n, p, q in pairs(model, oracle.model):
        close(p, q, n)


@on_ranks(4)
def test_accumulation_copies_and_casts(rank: int, world: int) -> None:
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"])
    oracle = Plain(make(Stack), 2)
    xs = [[batch(Stack, s, r) for s in range(3)] for r in range(2)]
    with sw.no_sync(model):
        for x in xs[rank // 2][:2]:
            loss_of(model(x)).backward()
    loss_of(model(xs[rank // 2][2])).backward()
    oracle.backward(*xs)
    for n, p, q in pairs(model, oracle.model):
        close(p.grad, q.grad, n)
    twin = copy.deepcopy(model)
    for n, p, q in pairs(twin, model):
        assert p.placements == q.placements and torch.equal(local(p), local(q)), n
    assert torch.equal(twin(xs[0][0]), model(xs[0][0]))
    for (n, whole), q in zip(sw.full_parameters(model), oracle.model.parameters(), strict=True):
        assert torch.equal(whole, q.detach()), n
    model.to(torch.float64)
    assert model.layers[0].up.weight.dtype == torch.float64
    model(xs[0][0].double()).sum().backward()
    assert local(model.layers[0].up.weight.grad).dtype == torch.float64


@on_ranks(4)
def test_mixed_precision(rank: int, world: int) -> None:
    mesh = grid(world)
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ours = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    from torch.distributed.fsdp import MixedPrecisionPolicy

    theirs = shard_layers(
        torch_fully_shard,
        stack(mesh["tp"]),
        mesh=mesh["dp"],
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    for model in (ours, theirs):
        loss_of(model(batch(Stack, 0, rank // 2))).backward()
    same_as_torch(ours, theirs, "bf16")


@on_ranks(4)
def test_from_meta_to_weights(rank: int, world: int) -> None:
    """The weights of one process, whatever cuts them."""
    mesh = grid(world)
    with torch.device("meta"):
        model = stack(mesh["tp"])
    shard_layers(sw.fully_shard, model, mesh=mesh["dp"])
    sw.materialize(model, seed=3)
    plain = make(Stack)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    for n, p, q in pairs(model, plain):
        assert torch.equal(full(p), q.detach()), n
    model(batch(Stack, 0, rank // 2)).sum().backward()


@on_ranks(4)
def test_loading(rank: int, world: int) -> None:
    mesh = grid(world)
    model = shard_layers(sw.fully_shard, stack(mesh["tp"]), mesh=mesh["dp"])
    other = make(Stack, seed=5)
    model.load_state_dict(other.state_dict())
    for n, p, q in pairs(model, other):
        assert torch.equal(full(p), q.detach()), n
    third = make(Stack, seed=6)
    sharded = {
        n: distribute_like(q.detach(), p)
        for (n, p), q in zip(model.named_parameters(), third.parameters(), strict=True)
    }
    model.load_state_dict(sharded, assign=True)
    assert torch.isfinite(model(batch(Stack, 0, 0))).all()
    for n, p, q in pairs(model, third):
        assert torch.equal(full(p), q.detach()), n
    parallel_again = stack(mesh["tp"])  # tensor parallel parameters in place of sharded ones
    model.layers[0].up.weight = parallel_again.layers[0].up.weight
    assert torch.isfinite(model(batch(Stack, 0, 0))).all()
    assert torch.equal(full(model.layers[0].up.weight), make(Stack).layers[0].up.weight.detach())


def distribute_like(whole: torch.Tensor, like: Any) -> Any:
    """`distribute_tensor` takes no strided shards of uneven parts."""
    own = part_of(whole, like.device_mesh, like.placements).contiguous()
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4, timeout_s=120)
def test_activation_checkpointing(rank: int, world: int, transport: str) -> None:
    from torch.distributed._composable import checkpoint

    mesh = grid(world)
    model = stack(mesh["tp"])
    for layer in model.layers:
        checkpoint(layer)
    shard_layers(sw.fully_shard, model, mesh=mesh["dp"], transport=transport)
    oracle = Plain(make(Stack), 2)
    loss_of(model(batch(Stack, 0, rank // 2))).backward()
    oracle.step(0)
    for n, p, q in pairs(model, oracle.model):
        close(p.grad, q.grad, n)


# -- choosing dims, refusing ---------------------------------------------------------------------
@on_ranks(4)
def test_the_dim_that_tensor_parallelism_does_not_use(rank: int, world: int) -> None:
    mesh = grid(world)

    def other_dim(param: Any) -> Shard | None:
        if not isinstance(param, DTensor) or param.ndim < 2:
            return None
        return Shard(-1) if param.placements[0] == Shard(0) else Shard(0)

    def build() -> Any:
        torch.manual_seed(0)
        model: Any = nn.Module()
        model.layers = nn.ModuleList([Ffn(4, 8)])
        from mesh_kit import parallel

        return parallel(model, mesh["tp"]).layers[0]

    ours, theirs = build(), build()
    sw.fully_shard(ours, mesh=mesh["dp"], shard_placement_fn=other_dim)
    torch_fully_shard(theirs, mesh=mesh["dp"], shard_placement_fn=other_dim)
    assert ours.up.weight.placements == (Shard(1), Shard(0))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank // 2))
    for model in (ours, theirs):
        model(x).square().sum().backward()
    same_as_torch(ours, theirs, "Shard(-1)")
    assert local(ours.up.weight).is_contiguous() and local(ours.up.weight.grad).is_contiguous()


@on_ranks(2)
def test_one_data_rank_issues_no_collective(rank: int, world: int) -> None:
    """Tensor parallelism's own go through functional collectives, which are not these names."""
    mesh = named_mesh(dp=1, tp=2)
    options = {"mesh": mesh["dp"], "offload_policy": sw.CPUOffloadPolicy()}
    model = shard_layers(sw.fully_shard, stack(mesh["tp"]), **options)
    names = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast"]
    names += [n for n in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, n)]
    with contextlib.ExitStack() as patches:
        calls = [patches.enter_context(mock.patch.object(dist, name)) for name in names]
        loss_of(model(batch(Stack, 0, 0))).backward()
    assert not any(call.called for call in calls)
    oracle = Plain(make(Stack), 1)
    oracle.step(0)
    for n, p, q in pairs(model, oracle.model):
        close(p.grad, q.grad, n)


@on_ranks(4)
def test_meshes_that_do_not_fit_are_refused(rank: int, world: int) -> None:
    mesh = grid(world)
    with pytest.raises(ValueError, match=r"up\.weight: is a DTensor over the mesh.*dp_mesh_dims"):
        sw.fully_shard(stack(mesh["tp"]), mesh=mesh["tp"])


@on_ranks(4)
def test_a_stray_tensor_parallel_parameter_is_found(rank: int, world: int) -> None:
    mesh = grid(world)
    model = stack(mesh["tp"])
    sw.fully_shard(model.layers[0], mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"no unit owns: .*layers\.1\.up\.weight"):
        model(batch(Stack, 0, 0))
