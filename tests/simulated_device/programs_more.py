"""Programs that do more than the usual loop: streams of the user's own, units that are left out,
ranks that run out of data, other placements and meshes, two models, other optimizers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from engine.engine_kit import Blocks, Branches, ConvNorm, Mlp, Uneven, make
from shardwise import RowShard
from shardwise.layout import Cuts
from simulated_device.programs import HALF, STEPS, Place, Program, Tensors, Wide, results, train


class OnOneRank(RowShard):
    """Matrices whole on the last rank: cuts that padding would inflate."""

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.whole(rows, world, world - 1)


class ByColumns(RowShard):
    """Columns, by blocks of two."""

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.block(rows, world, 2)


def placed(placement: RowShard, place: Place, model: Any) -> Any:
    def choose(param: nn.Parameter) -> RowShard | None:
        return placement if param.ndim == 2 else None

    return place.shard(model, shard_placement_fn=choose)


def loop(place: Place, model: Any, step_of: Any, optimizer: Any = None) -> Tensors:
    """Steps whose forward and backward are the caller's."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        losses.append(step_of(step).detach())
        optimizer.step()
        optimizer.zero_grad()
    return results(model, losses=losses)


class Crossed(nn.Module):
    """Cut along their last dims: a part of `wide` is shorter on the last of three ranks, and what
    lies behind it begins earlier there.
    """

    features = 13

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.wide = nn.Parameter(torch.randn(3, 13))
        self.shift = nn.Parameter(torch.randn(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift) @ self.wide.mT


def cut_last(place: Place, model: Any) -> Any:
    return place.shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))


# -- streams and order ---------------------------------------------------------------------------
def on_a_stream_of_the_user(place: Place) -> Tensors:
    """Forward and backward run on another stream than the optimizer."""
    model = place.shard(make(Mlp))
    if place.device == "cpu":

        def step_of(step: int) -> torch.Tensor:
            loss = place.loss(model, step)
            loss.backward()
            return loss

        return loop(place, model, step_of)
    side = torch.sim.Stream()

    def step_on_side(step: int) -> torch.Tensor:
        side.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(side):
            loss = place.loss(model, step)
            loss.backward()
        torch.sim.current_stream().wait_stream(side)
        return loss

    return loop(place, model, step_on_side)


def gathered_ahead(place: Place) -> Tensors:
    """The user asks for parameters before they are needed, and for some that are not."""
    model = place.shard(make(Mlp))

    def step_of(step: int) -> torch.Tensor:
        handles = [layer.unshard(async_op=True) for layer in model.layers]
        handles[0].wait()
        loss = place.loss(model, step)
        loss.backward()
        model.layers[step % 3].unshard()
        model.layers[step % 3].reshard()
        return loss

    return loop(place, model, step_of)


def prefetched(place: Place, enabled: bool) -> Tensors:
    model = place.shard(make(Blocks))
    sw.set_prefetch(model, enabled)
    if enabled:
        model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
        model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of)


def with_reductions_apart(place: Place, model: Any) -> Any:
    model = place.shard(model)
    model.set_separate_reduce_scatter_group()
    return model


def with_memory_of_the_group(place: Place, model: Any) -> Any:
    model = place.shard(model)
    for module in (*model.layers, model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    return model


# -- what takes part -----------------------------------------------------------------------------
def left_out(place: Place, strategy: str) -> Tensors:
    """Each step runs other units, and one backward follows two forwards."""
    model = place.shard(make(Branches), strategy)
    x = torch.linspace(-1, 1, 32).view(4, 8).to(place.device, non_blocking=True)

    def step_of(step: int) -> torch.Tensor:
        loss = model(x * (1 + place.rank), step % 3).square().mean()
        loss = loss + model(x + 1, 0, (step + 1) % 3).square().mean()
        loss.backward()
        return loss

    return loop(place, model, step_of)


def out_of_data(place: Place) -> Tensors:
    model = place.shard(make(Mlp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [place.batch(model, step) for step in range(2 + 2 * place.rank)]
    for x in sw.join(model, batches, mode="continue"):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def counted_by_tokens(place: Place) -> Tensors:
    model = place.shard(make(Mlp))

    def step_of(step: int) -> torch.Tensor:
        rows = 2 + (step + place.rank) % 3
        out = model(place.batch(model, step)[:rows])
        loss = sw.global_mean(out.square().sum(), out.numel())
        loss.backward()
        return loss

    return loop(place, model, step_of)


def scaled(place: Place) -> Tensors:
    """fp16 with a scaler: one step overflows on one rank, and is left out on all."""
    model = place.shard(make(Mlp), mp_policy=HALF["fp16"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(place.device, init_scale=256.0)
    losses = []
    for step in range(STEPS):
        loss = place.loss(model, step)
        overflows = step == 1 and place.rank == 0
        scaler.scale(loss * (1e38 if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert scaler.get_scale() == 128.0
    return results(model, losses=losses)


# -- more than one model, other meshes -----------------------------------------------------------
def two_models(place: Place) -> Tensors:
    """The teacher is sharded too, and runs without gradients between the student's passes."""
    student, teacher = place.shard(make(Mlp)), place.shard(make(Mlp, seed=1), "shard_grad_op")

    def step_of(step: int) -> torch.Tensor:
        x = place.batch(student, step)
        out = student(x)
        with torch.no_grad():
            target = teacher(x)
        loss = (out - target).square().mean()
        loss.backward()
        return loss

    return loop(place, student, step_of)


def two_streams(place: Place) -> Tensors:
    """Two models are evaluated on two streams of the user that nothing orders, and one on both."""
    models = [place.shard(make(Blocks, seed=i)) for i in range(2)]
    shared = place.shard(make(Blocks, seed=2), "shard_grad_op")
    inputs = [place.batch(models[0], step) for step in range(3)]
    if place.device == "cpu":
        users: list[Any] = [contextlib.nullcontext] * 2
    else:
        torch.accelerator.synchronize()
        users = [functools.partial(torch.sim.stream, torch.sim.Stream()) for _ in range(2)]
    outputs: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for step, x in enumerate(inputs):
            for i, (model, user) in enumerate(zip(models, users, strict=True)):
                with user():
                    outputs[f"{i} {step}"] = model(x)
        for i, user in enumerate(users):
            with user():
                outputs[f"shared {i}"] = shared(inputs[0])
    if place.device != "cpu":
        torch.accelerator.synchronize()
    return {key: out.cpu() for key, out in outputs.items()}


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Ffn() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def with_tensor_parallel(place: Place, model: Any) -> Any:
    shape = (place.world // 2, 2)
    mesh = init_device_mesh(place.device, shape, mesh_dim_names=("data", "tensor"))
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], plan)
        sw.fully_shard(layer, mesh=mesh["data"], transport="c10d")
    return sw.fully_shard(model, mesh=mesh["data"], transport="c10d")


def other_optimizer(place: Place, kind: str) -> Tensors:
    model = place.shard(make(Uneven))
    make_optimizer = {
        "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        "fused AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        "one by one": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    }[kind]

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of, make_optimizer(model.parameters()))


def read_whole(place: Place) -> Tensors:
    """Whole parameters between the steps, and a copy of the model's state on the host."""
    seen: list[torch.Tensor] = []

    def between(model: Any, step: int) -> None:
        for _, whole in sw.full_parameters(model):
            seen.append(whole.float().sum().cpu())
        state = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
        seen.append(sum(value.float().sum() for value in state.values()))
        copy.deepcopy(state)

    weights = train(place, between=between)
    return {**weights, "seen": torch.stack(seen)}


run = functools.partial
INT8 = sw.Wire(gather="int8", reduce="int8", error_feedback=True)
BF16 = sw.Wire(gather="bf16", reduce="bf16", axis="both")
WIRES: dict[str, tuple[int, Program]] = {
    "wire int8": (2, run(train, model_class=Wide, wire=INT8)),
    "wire int8, small": (2, run(train, wire=INT8, clip=True)),
    "wire int8, bf16": (2, run(train, model_class=Wide, wire=INT8, mp_policy=HALF["bf16"])),
    "wire bf16, hybrid": (4, run(train, strategy="hybrid_shard", wire=BF16, num_micro=2)),
    "wire bf16, split": (4, run(train, strategy="hybrid_full_optimizer", wire=BF16)),
    "wire between hosts": (4, run(train, wire=sw.Wire("int8", "int8", host_ranks=2))),
    "wire int8, no_shard": (2, run(train, strategy="no_shard", wire=sw.Wire(reduce="int8"))),
    "wire int8, offload": (2, run(train, wire=INT8, offload_policy=sw.CPUOffloadPolicy())),
}
OFFLOAD = sw.CPUOffloadPolicy()
MORE_PROGRAMS: dict[str, tuple[int, Program]] = {
    **WIRES,
    "a stream of the user": (2, on_a_stream_of_the_user),
    "gathered ahead": (2, gathered_ahead),
    "prefetch": (2, run(prefetched, enabled=True)),
    "no prefetch": (2, run(prefetched, enabled=False)),
    "reductions apart": (2, run(train, model_class=Blocks, prepare=with_reductions_apart)),
    "memory of the group": (2, run(train, prepare=with_memory_of_the_group)),
    "units left out": (2, run(left_out, strategy="full_shard")),
    "units left out, kept": (2, run(left_out, strategy="shard_grad_op")),
    "ranks out of data": (2, out_of_data),
    "counted by tokens": (2, counted_by_tokens),
    "scaled fp16": (2, scaled),
    "two models": (2, two_models),
    "two streams": (2, two_streams),
    "tensor parallel": (4, run(train, model_class=Stack, prepare=with_tensor_parallel)),
    "whole on one rank": (2, run(train, model_class=Uneven, prepare=run(placed, OnOneRank(0)))),
    "by columns": (2, run(train, model_class=Wide, prepare=run(placed, ByColumns(-1)))),
    "cut along last dims": (3, run(train, model_class=Crossed, prepare=cut_last)),
    "convolutions": (2, run(train, model_class=ConvNorm)),
    **{k: (2, run(other_optimizer, kind=k)) for k in ("SGD", "fused AdamW", "one by one")},
    "read whole": (2, read_whole),
    "offload, accumulation": (2, run(train, num_micro=3, offload_policy=OFFLOAD)),
    "offload, hybrid": (4, run(train, strategy="hybrid_shard", offload_policy=OFFLOAD)),
    "offload, bf16": (2, run(train, mp_policy=HALF["bf16"], offload_policy=OFFLOAD)),
    "large, accumulation bf16": (
        2,
        run(train, model_class=Wide, num_micro=2, mp_policy=HALF["bf16"]),
    ),
    "step in backward, accumulation": (2, run(train, num_micro=2, in_backward=True)),
    "hybrid, accumulation": (
        4,
        run(train, strategy="hybrid_full_optimizer", model_class=Uneven, num_micro=3, clip=True),
    ),
}
