"""Small training programs that run on any device, for comparing what comes out of them.

Each takes the place where it runs (device, rank, world) and returns tensors on the CPU: losses,
norms, weights. `PROGRAMS` names them, with the number of ranks that they take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
import simulated_device
from engine.engine_kit import HYBRID_STRATEGIES, STRATEGIES, Blocks, Mlp, Uneven, full, make
from shardwise.engine.services import activations
from simulated_device.hooked import SentAsHalf

STEPS = 3
HALF = {
    "fp16": sw.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
    "bf16": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduced": sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
Tensors = dict[str, torch.Tensor]


class Wide(nn.Module):
    """Gradients above 256 KiB, which are copied as they arrive, between small ones."""

    features = 300

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Dropping(nn.Module):
    """Draws random numbers, and draws them again where it is recomputed."""

    features = 16

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 16))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass
class Place:
    """Where a program runs. `steady` is what the device did in the last step, if it counted."""

    device: str
    rank: int
    world: int
    folder: Path
    steady: Any = field(default=None, repr=False)

    def mesh(self, strategy: str = "full_shard") -> DeviceMesh:
        if strategy not in HYBRID_STRATEGIES:
            return init_device_mesh(self.device, (self.world,))
        shape = (2, self.world // 2)
        return init_device_mesh(self.device, shape, mesh_dim_names=("replicate", "shard"))

    def shard(self, model: nn.Module, strategy: str = "full_shard", **options: Any) -> Any:
        """Each of `layers` and the root."""
        options = {"strategy": strategy, **options}
        if options.get("reshard_after_forward") is not None:
            del options["strategy"]
        mesh = self.mesh(strategy)
        for layer in model.layers:
            sw.fully_shard(layer, mesh=mesh, transport="c10d", **options)
        return sw.fully_shard(model, mesh=mesh, transport="c10d", **options)

    def batch(self, model: Any, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        x = torch.randn(4, model.features, generator=generator)
        return x.to(self.device, non_blocking=True)

    def loss(self, model: Any, index: int) -> torch.Tensor:
        out = model(self.batch(model, index)).float()
        target = torch.linspace(-1, 1, out.shape[-1]).to(self.device, non_blocking=True)
        return (out - target).square().mean()

    def count_from_here(self) -> None:
        if self.device == simulated_device.DEVICE:
            races = simulated_device.report().races
            assert not races, races
            simulated_device.clear()

    def count_to_here(self) -> None:
        if self.device == simulated_device.DEVICE:
            self.steady = simulated_device.report()


def results(model: nn.Module, **lists: list[Any]) -> Tensors:
    """Weights whole, and what was collected; the host waits here and not before."""
    found = {name: full(p).cpu() for name, p in model.named_parameters()}
    for name, values in lists.items():
        found[name] = torch.stack([full(torch.as_tensor(v)).float().cpu() for v in values])
    return found


def train(
    place: Place,
    model_class: Callable[[], nn.Module] = Mlp,
    strategy: str = "full_shard",
    *,
    num_micro: int = 1,
    sums: str = "no sync",
    clip: bool = False,
    in_backward: bool = False,
    between: Callable[[Any, int], None] | None = None,
    prepare: Callable[[Place, Any], Any] | None = None,
    **options: Any,
) -> Tensors:
    """Steps of AdamW with what training is made of; the last step is counted."""
    model = make(model_class)
    model = prepare(place, model) if prepare else place.shard(model, strategy, **options)
    model.features = make(model_class).features
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if in_backward:
        sw.step_in_backward(model, optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [step * num_micro + micro for micro in range(num_micro)]
        if step == STEPS - 1:
            place.count_from_here()
        for index in batches:
            is_last = index == batches[-1]
            if sums == "no sync":
                model.set_requires_gradient_sync(is_last)
            elif sums == "no all-reduce":
                model.set_requires_all_reduce(is_last)
            torch.manual_seed(
                index
            )  # what is drawn on the device comes from a generator of its own
            loss = place.loss(model, index)
            loss.backward()
            losses.append(loss.detach())
        if clip:
            norms.append(sw.clip_grad_norm_(model.parameters(), 0.1))
        if not in_backward:
            optimizer.step()
        optimizer.zero_grad()
        if step == STEPS - 1:
            place.count_to_here()
        if between is not None:
            between(model, step)
    return results(model, losses=losses, **({"norms": norms} if norms else {}))


# -- ways to make a sharded model ----------------------------------------------------------------
def recomputed(kind: Any, place: Place, model: Any) -> Any:
    mesh, unit = place.mesh(), type(model.layers[0]).__name__
    return sw.shard_model(
        model, mesh=mesh, unit=[unit], transport="c10d", activation_checkpointing=kind
    )


def offloaded_activations(place: Place, model: Any) -> Any:
    """On CPU there is nothing to offload: the numbers must be those of the usual way."""
    mesh, unit = place.mesh(), type(model.layers[0]).__name__
    options: dict[str, Any] = {"mesh": mesh, "unit": [unit], "transport": "c10d"}
    if place.device == "cpu":
        return sw.shard_model(model, **options)
    # Those of these models are small.
    activations.OFFLOADED_FROM_BYTES = 16
    return sw.shard_model(model, **options, offload_activations=True)


def from_meta(place: Place, model: Any) -> Any:
    with torch.device("meta"):
        model = type(model)()
    model = place.shard(model)
    torch.manual_seed(3)
    sw.materialize(model)
    return model


def to_empty_and_loaded(place: Place, model: Any) -> Any:
    with torch.device("meta"):
        empty = type(model)()
    empty = place.shard(empty)
    empty.to_empty(device=place.device)
    sw.load_full_state_dict(empty, model.state_dict())
    return empty


def with_hooks(place: Place, model: Any) -> Any:
    """Parameters that are gathered in their own way."""
    model = model.to(place.device)
    for layer in model.layers:
        layer.weight = nn.Parameter(SentAsHalf(layer.weight.detach()))
    return place.shard(model)


def from_two_devices(place: Place, model: Any) -> Any:
    """Weights that are there already, beside biases that are not."""
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight.detach().to(place.device))
    return place.shard(model)


# -- programs of their own -----------------------------------------------------------------------
def evaluate(place: Place, strategy: str) -> Tensors:
    found: list[torch.Tensor] = []
    place_batches = iter(range(100, 200))

    def between(model: Any, step: int) -> None:
        model.eval()
        with torch.no_grad():
            found.extend(place.loss(model, next(place_batches)) for _ in range(2))
        model.train()

    weights = train(place, strategy=strategy, between=between)
    return {**weights, "evaluated": torch.stack(found).cpu()}


def fail_in_the_middle(place: Place, strategy: str) -> Tensors:
    """A forward, and a backward, that end by an exception; the steps after them are right."""
    model = place.shard(make(Mlp), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def refuse(*_: Any) -> None:
        raise KeyError("on purpose")

    losses = []
    for step in range(STEPS):
        hook = model.layers[1].register_forward_pre_hook(refuse)
        with pytest.raises(KeyError):
            place.loss(model, step)
        hook.remove()
        x = place.batch(model, step).requires_grad_()
        x.register_hook(refuse)  # at the very end, with reductions in flight
        with pytest.raises(KeyError):
            model(x).square().mean().backward()
        hook = model.layers[1].register_full_backward_pre_hook(refuse)
        with pytest.raises(KeyError):
            place.loss(model, step).backward()
        hook.remove()
        optimizer.zero_grad()
        loss = place.loss(model, step)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return results(model, losses=losses)


def save_and_load(place: Place, how: str) -> Tensors:
    """A run that is saved in the middle and taken up by another model."""

    def made(seed: int) -> tuple[Any, Any]:
        model = place.shard(make(Uneven, seed))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            place.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, optimizer = made(0)
    steps(first, optimizer, range(2))
    folder = place.folder / f"{how}-{place.device}"
    model, second_optimizer = made(1)
    if how == "ours":
        manager = sw.CheckpointManager(folder)
        manager.save(2, first, optimizer)
        checkpoint, skipped = manager.latest()
        assert checkpoint is not None and not skipped
        manager.load(checkpoint, model, second_optimizer)
    elif how == "dcp":
        dcp.save({"model": first.state_dict()}, checkpoint_id=folder)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        second_optimizer.load_state_dict(optimizer.state_dict())
    else:
        model.load_state_dict(first.state_dict())
        second_optimizer.load_state_dict(optimizer.state_dict())
    for a, b in zip(first.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(a).cpu(), full(b).cpu())
    steps(model, second_optimizer, range(2, 4))
    return results(model)


def in_tree_order(place: Place) -> Tensors:
    model = place.shard(make(Mlp))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    with sw.reproducible(model, optimizer, num_micro_batches=5, seed=5) as run:
        for step in range(STEPS):
            for micro in run.micro_batches(step):
                generator = torch.Generator().manual_seed(micro.seed % 2**31)
                x = torch.randn(4, model.features, generator=generator).to(place.device)
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.detach())
            norms.append(sw.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return results(model, losses=losses, norms=norms)


Program = Callable[[Place], Tensors]
run = functools.partial
PROGRAMS: dict[str, tuple[int, Program]] = {
    **{name: (2, run(train, model_class=Blocks, strategy=name)) for name in STRATEGIES},
    **{name: (4, run(train, strategy=name)) for name in HYBRID_STRATEGIES},
    **{f"uneven, {n}": (2, run(train, model_class=Uneven, strategy=n)) for n in STRATEGIES},
    **{f"uneven, {n}": (4, run(train, model_class=Uneven, strategy=n)) for n in HYBRID_STRATEGIES},
    **{f"large, {n}": (2, run(train, model_class=Wide, strategy=n)) for n in STRATEGIES},
    "kept until the backward": (2, run(train, reshard_after_forward=False)),
    "kept as a part": (4, run(train, reshard_after_forward=2)),
    **{n: (2, run(train, model_class=Blocks, mp_policy=policy)) for n, policy in HALF.items()},
    **{f"large, {n}": (2, run(train, model_class=Wide, mp_policy=p)) for n, p in HALF.items()},
    **{
        f"no_shard, {n}": (2, run(train, strategy="no_shard", mp_policy=p)) for n, p in HALF.items()
    },
    "accumulation": (2, run(train, num_micro=3)),
    "accumulation, large": (2, run(train, model_class=Wide, num_micro=3)),
    "accumulation, bf16": (2, run(train, num_micro=3, mp_policy=HALF["bf16"])),
    "accumulation, synchronized": (2, run(train, num_micro=3, sums="each")),
    "accumulation, no all-reduce": (
        4,
        run(train, strategy="hybrid_shard", num_micro=3, sums="no all-reduce"),
    ),
    "clipping": (2, run(train, model_class=Uneven, clip=True)),
    "clipping, hybrid": (4, run(train, strategy="hybrid_full_optimizer", clip=True)),
    "recomputation": (2, run(train, model_class=Dropping, prepare=run(recomputed, True))),
    "recomputation, selective": (
        2,
        run(train, model_class=Blocks, prepare=run(recomputed, "selective")),
    ),
    "step in backward": (2, run(train, in_backward=True)),
    "dropout": (2, run(train, model_class=Dropping)),
    "meta, materialize": (2, run(train, prepare=from_meta)),
    "meta, to_empty": (2, run(train, model_class=Uneven, prepare=to_empty_and_loaded)),
    "from two devices": (2, run(train, prepare=from_two_devices)),
    "extensions": (2, run(train, prepare=with_hooks)),
    **{f"evaluation, {n}": (2, run(evaluate, strategy=n)) for n in STRATEGIES},
    **{f"exceptions, {n}": (2, run(fail_in_the_middle, strategy=n)) for n in STRATEGIES},
    **{f"checkpoint, {how}": (2, run(save_and_load, how=how)) for how in ("ours", "dcp", "state")},
    "offload of parameters": (
        2,
        run(train, model_class=Blocks, offload_policy=sw.CPUOffloadPolicy()),
    ),
    "offload of parameters, clipping": (
        2,
        run(train, model_class=Uneven, clip=True, offload_policy=sw.CPUOffloadPolicy()),
    ),
    "offload of parameters, pageable": (
        2,
        run(train, offload_policy=sw.CPUOffloadPolicy(pin_memory=False)),
    ),
    "offload of activations": (2, run(train, model_class=Blocks, prepare=offloaded_activations)),
    "reproducible": (2, in_tree_order),
}
