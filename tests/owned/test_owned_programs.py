"""Random programs: any optimizer, shapes, layout, gradients that are missing, options that change,
state that goes through a state dict; beside the optimizer of one process, to the last bit.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn as nn
from test_owned import set_gradients
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from ranks import on_ranks

KINDS: list[tuple[Any, tuple[int, ...]]] = [  # and the numbers of dims that it takes
    (torch.optim.Muon, (2, 2, 3)),
    (torch.optim.Adafactor, (1, 2, 3)),
    (torch.optim.AdamW, (0, 1, 2, 3, 4)),
    (torch.optim.SGD, (0, 1, 2, 3)),
    (torch.optim.NAdam, (0, 1, 2)),
]
LAYOUTS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "whole", "blocks", "last")


class Net(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(value))


def sharded(net: Net, world: int, layout: str, chosen: random.Random) -> Net:
    mesh, options = init_device_mesh("cpu", (world,)), dict[str, Any]()
    if layout == "hybrid_shard" and world % 2 == 0:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "hybrid_shard":
        layout = "full_shard"
    if layout == "whole":
        options["shard_placement_fn"] = sw.whole_matrices(net, world)
    elif layout == "blocks":
        options["shard_placement_fn"] = sw.whole_blocks(chosen.choice((4, 32)))
    elif layout == "last":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim else None
    else:
        options["strategy"] = layout
    return sw.fully_shard(net, mesh=mesh, **options)


def run(seed: int, world: int) -> None:
    chosen = random.Random(seed)
    build, dims = chosen.choice(KINDS)
    dtype = chosen.choice((torch.float32, torch.float32, torch.bfloat16))
    shapes = [
        tuple(chosen.randint(1, 9) for _ in range(chosen.choice(dims)))
        for _ in range(chosen.randint(1, 7))
    ]
    layout = chosen.choice(LAYOUTS)
    what = f"seed {seed}: {build.__name__} {dtype} {layout} {shapes}"
    params = list(sharded(Net(shapes, dtype, seed), world, layout, chosen).parameters())
    optimizer = sw.OwnedOptimizer(params, build, lr=0.05)
    # Of a stack the plain optimizer has the matrices.
    splits = build is torch.optim.Muon
    wholes = [
        list(p.detach().unbind()) if splits and p.ndim == 3 else [p.detach()]
        for p in Net(shapes, dtype, seed).parameters()
    ]
    plain = [[nn.Parameter(t.clone()) for t in tensors] for tensors in wholes]
    other = build([t for tensors in plain for t in tensors], lr=0.05)
    for step in range(4):
        set_gradients(params, 10 * seed + step)
        for param, tensors in zip(params, plain, strict=True):
            whole = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            parts = whole.unbind() if splits and param.ndim == 3 else [whole]
            is_there = chosen.random() < 0.8
            param.grad = param.grad if is_there else None
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.grad = part.clone() if is_there else None
        for one in (optimizer, other):
            one.step()
        for group, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
            group["lr"] = theirs["lr"] = 0.05 / (step + 1)
        if chosen.random() < 0.3:
            for one in (optimizer, other):
                one.load_state_dict(one.state_dict())
    for param, tensors in zip(params, plain, strict=True):
        whole = torch.stack([t.detach() for t in tensors])
        found = param.full_tensor() if isinstance(param, DTensor) else param.detach()
        expected = whole if splits and param.ndim == 3 else whole[0]
        assert torch.equal(found, expected), f"{what} {tuple(param.shape)}"
        slots = optimizer.state.get(param, {})
        for name, value in other.state.get(tensors[0], {}).items():
            held = slots[name]
            held = held.full_tensor() if isinstance(held, DTensor) else torch.as_tensor(held)
            held = held[0] if splits and param.ndim == 3 else held
            assert torch.equal(held, torch.as_tensor(value)), f"{what} {name}"


@on_ranks(2, 3, 4)
def test_random_programs(rank: int, world: int) -> None:
    for seed in range(1000 * world, 1000 * world + 25):
        run(seed, world)
