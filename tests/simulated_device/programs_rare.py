"""Programs that few users write: gradients of gradients, copies of a sharded model, layers that are
frozen and thawed, models that go while they are gathered, checkpoints that cross devices.
"""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from engine.engine_kit import Blocks, Mlp, Uneven, make
from simulated_device.programs import STEPS, Place, Program, Tensors, Wide, full, results
from simulated_device.programs_more import OFFLOAD, loop


def penalized(place: Place, strategy: str) -> Tensors:
    """The gradient of the input is part of the loss."""
    model = place.shard(make(Mlp), strategy)

    def step_of(step: int) -> torch.Tensor:
        x = place.batch(model, step).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        loss.backward()
        return loss

    return loop(place, model, step_of)


def in_inference_mode(place: Place) -> Tensors:
    model = place.shard(make(Blocks))

    def step_of(step: int) -> torch.Tensor:
        with torch.inference_mode():
            scale = model(place.batch(model, step)).abs().max()
        loss = place.loss(model, step) * scale.clone()
        loss.backward()
        return loss

    return loop(place, model, step_of)


def copied(place: Place) -> Tensors:
    """A copy of a model that has its reductions apart trains on, beside the first one."""
    first = place.shard(make(Blocks))
    first.set_separate_reduce_scatter_group()
    place.loss(first, 0).backward()
    second = copy.deepcopy(first)
    second.zero_grad()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(first, step) + 0.5 * place.loss(second, step + 1)
        loss.backward()
        return loss

    found = loop(place, first, step_of, optimizer)
    return {**found, **{f"second {k}": v for k, v in results(second).items()}}


def thawed(place: Place, model_class: type[nn.Module]) -> Tensors:
    """Another part of the model trains in each step."""
    model = place.shard(make(model_class))

    def step_of(step: int) -> torch.Tensor:
        for i, layer in enumerate(model.layers):
            layer.requires_grad_(i != step % 3)
        next(iter(model.layers[step % 2].parameters())).requires_grad_(step != 1)
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of)


class Waves(nn.Module):
    """Complex weights."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wave() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(8, 8))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x @ self.real) * self.turn.real + self.turn.imag)


def with_complex_weights(place: Place) -> Tensors:
    model = place.shard(make(Waves))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(model, step)
        loss.backward()
        return loss

    found = loop(place, model, step_of, optimizer)
    return {k: torch.view_as_real(v) if v.is_complex() else v for k, v in found.items()}


def unequal_data(place: Place) -> Tensors:
    """Large parameters, reduced in place, and ranks that run out of data."""
    model = place.shard(make(Wide))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [place.batch(model, step) for step in range(2 + place.rank)]
    for x in sw.join(model, batches, mode="continue"):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model)


def gone_while_gathered(place: Place) -> Tensors:
    """Models whose gathers nobody waits for: they go, and another one takes the memory."""
    for seed in range(3):
        other = place.shard(make(Blocks, seed=seed))
        handles = [layer.unshard(async_op=True) for layer in other.layers]
        del other, handles
        gc.collect()
    model = place.shard(make(Blocks))
    for layer in model.layers:
        layer.unshard(async_op=True)  # and here: the forward takes them over
    model.layers[1].reshard()

    def step_of(step: int) -> torch.Tensor:
        model.layers[step % 2].unshard(async_op=True)
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of)


def across_devices(place: Place) -> Tensors:
    """Saved on the device, where rows are padded, loaded on the CPU, and back."""
    model = place.shard(make(Uneven))
    place.loss(model, 0).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    optimizer.zero_grad()
    beside = make(Uneven, seed=1)
    on_cpu = init_device_mesh("cpu", (place.world,))
    for layer in beside.layers:
        sw.fully_shard(layer, mesh=on_cpu, transport="c10d")
    sw.fully_shard(beside, mesh=on_cpu, transport="c10d")
    second = torch.optim.AdamW(beside.parameters(), lr=1e-2)
    manager = sw.CheckpointManager(place.folder / f"across-{place.device}")
    move(manager, 1, (model, optimizer), (beside, second))
    for a, b in zip(model.parameters(), beside.parameters(), strict=True):
        assert torch.equal(full(a).cpu(), full(b).cpu())
    move(manager, 2, (beside, second), (model, optimizer))

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of, optimizer)


def move(manager: Any, step: int, source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    manager.save(step, *source)
    checkpoint, skipped = manager.latest()
    assert checkpoint is not None and not skipped
    manager.load(checkpoint, *target)


def stepped_behind(place: Place, in_backward: bool, **options: Any) -> Tensors:
    """A thread steps units beside the backward, or beside the next forward. `options` of the model
    and of its optimizer's offload.
    """
    policy = options.pop("offload_policy", None)
    model = place.shard(make(Blocks), **({"offload_policy": policy} if policy else {}))
    optimizer = sw.OffloadedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), state="cpu", in_background=True, **options
    )
    if in_backward:
        sw.step_in_backward(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = place.loss(model, step)
        loss.backward()
        losses.append(loss.detach())
        if not in_backward:
            losses.append(sw.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        optimizer.zero_grad()
    found = results(model, losses=losses)
    optimizer.close()
    return found


def by_owners(place: Place, optimizer_class: Any, whole: bool = False, **options: Any) -> Tensors:
    """Whole tensors are brought to their owners, and stepped there."""
    model = make(Blocks)
    if whole:
        options["shard_placement_fn"] = sw.whole_matrices(model, torch.distributed.get_world_size())
    model = place.shard(model, **options)
    is_muon = optimizer_class is torch.optim.Muon
    params = [p for p in model.parameters() if p.ndim == 2 or not is_muon]
    optimizer = sw.OwnedOptimizer(params, optimizer_class, lr=1e-2)

    def step_of(step: int) -> torch.Tensor:
        loss = place.loss(model, step)
        loss.backward()
        return loss

    return loop(place, model, step_of, optimizer)


run = functools.partial
RARE_PROGRAMS: dict[str, tuple[int, Program]] = {
    "gradients of gradients": (2, run(penalized, strategy="full_shard")),
    "gradients of gradients, kept": (2, run(penalized, strategy="shard_grad_op")),
    "inference mode": (2, in_inference_mode),
    "a copy": (2, copied),
    "frozen and thawed": (2, run(thawed, model_class=Blocks)),
    "frozen and thawed, large": (2, run(thawed, model_class=Wide)),
    "complex": (2, with_complex_weights),
    "ranks out of data, large": (2, unequal_data),
    "gone while gathered": (2, gone_while_gathered),
    "across devices": (3, across_devices),
    "behind the next forward": (2, run(stepped_behind, in_backward=False, offload_policy=OFFLOAD)),
    "behind the backward": (2, run(stepped_behind, in_backward=True, offload_policy=OFFLOAD)),
    "behind, shards on the device": (2, run(stepped_behind, in_backward=True, step_on="cpu")),
    "owners": (2, run(by_owners, optimizer_class=torch.optim.Muon)),
    "owners, replicas": (2, run(by_owners, optimizer_class=torch.optim.Muon, strategy="no_shard")),
    "owners, whole matrices": (2, run(by_owners, optimizer_class=torch.optim.Muon, whole=True)),
    "owners, numbers and rows": (3, run(by_owners, optimizer_class=torch.optim.Adafactor)),
    "owners, shards on the host": (
        2,
        run(by_owners, optimizer_class=torch.optim.Muon, offload_policy=OFFLOAD),
    ),
    "behind, stepped on the device": (2, run(stepped_behind, in_backward=False, step_on="device")),
}
