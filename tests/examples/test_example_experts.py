"""examples/experts.py: experts on a mesh of their own, beside one process on the whole batch.

Each rank adds up its own tokens first, so sums differ in their order from those of one process:
what is equal within 1e-5 here differs in the last bits.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks, run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "experts.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("experts_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def crowd(model: Any) -> None:
    """All tokens to the first two experts: other ranks get none."""
    for layer in model.layers:
        with torch.no_grad():
            layer.moe.router.weight[2:] = 0
            layer.moe.router.weight[:2] = 3 * layer.moe.router.weight[:2]
            layer.norms[1].bias.fill_(1.0)
            layer.moe.router.weight[:2] += 1.0


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def steps(
    model: Any, optimizer: Any, script: Any, numbers: range, world: int, rank: int
) -> list[dict[str, torch.Tensor]]:
    """Losses, gradients and norm of each step."""
    found = []
    for number in numbers:
        loss = script.loss_of(model, script.batch_of(number, world, rank))
        loss.backward()
        row = {f"grad {n}": whole(p.grad) for n, p in model.named_parameters()}
        row["norm"] = whole(sw.clip_grad_norm_(model.parameters(), 1.0))
        mean = loss.detach() / world
        if world > 1:
            torch.distributed.all_reduce(mean)
        row["loss"] = mean
        optimizer.step()
        optimizer.zero_grad()
        found.append(row)
    return found


def built(script: Any, world: int, expert_ranks: int, crowded: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = script.Model()
    if crowded:
        crowd(model)
    if world > 1:
        shape = (world // expert_ranks, expert_ranks)
        script.shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("data", "expert")))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def alone(crowded: bool, num: int) -> list[dict[str, torch.Tensor]]:
    script = example()
    return steps(*built(script, 1, 1, crowded), script, range(num), 1, 0)


def close(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("crowded", [False, True], ids=["spread", "crowded"])
@pytest.mark.parametrize("expert_ranks", [2, 4])
@on_ranks(4, timeout_s=120)
def test_like_one_process(rank: int, world: int, expert_ranks: int, crowded: bool) -> None:
    script = example()
    model, optimizer = built(script, world, expert_ranks, crowded)
    if crowded:
        chosen = []
        hook = model.layers[0].moe.router.register_forward_hook(
            lambda m, a, out: chosen.append(out.topk(2, -1).indices)
        )
        steps(model, optimizer, script, range(1), world, rank)
        hook.remove()
        assert set(chosen[0].flatten().tolist()) == {0, 1}, "other experts are used too"
        model, optimizer = built(script, world, expert_ranks, crowded)
    close(steps(model, optimizer, script, range(3), world, rank), alone(crowded, 3))


def saved(rank: int, world: int, folder: Path, expert_ranks: int) -> None:
    script = example()
    model, optimizer = built(script, world, expert_ranks, False)
    steps(model, optimizer, script, range(2), world, rank)
    sw.CheckpointManager(folder).save(2, model, optimizer)


def resumed(rank: int, world: int, folder: Path, expert_ranks: int) -> Any:
    script = example()
    model, optimizer = built(script, world, expert_ranks, True)  # other weights than those saved
    manager = sw.CheckpointManager(folder)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    manager.load(checkpoint, model, optimizer)
    return steps(model, optimizer, script, range(2, 3), world, rank)


def test_checkpoints_go_to_any_mesh(tmp_path: Path) -> None:
    wanted = alone(False, 3)[2:]
    run_ranks(4, saved, tmp_path, 2)
    for world, expert_ranks in ((4, 4), (4, 1), (2, 2), (1, 1)):
        close(run_ranks(world, resumed, tmp_path, expert_ranks)[0], wanted)
