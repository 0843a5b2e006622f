"""The least that a sharded step can cost in Python, for `host_time.py` to compare with: a floor, no
engine.

One gather before each forward and one before each backward, one reduction when the last gradient
is there, full parameters over a storage that is emptied between uses, modules that show shards at
rest. Nothing else: no check, no tie, no strategy, no prefetching, no exception that is survived,
plain tensors in `.grad`, parameters that divide evenly, one process group, float32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn


class Bare:
    """One unit: `module`, whose parameters `holder` has, of shapes (world, n)."""

    def __init__(self, module: nn.Module, holder: nn.Module) -> None:
        self.group = dist.group.WORLD
        world = dist.get_world_size()
        self.world, self.held = world, holder._parameters
        params = {name: p for name, p in self.held.items() if p is not None}
        self.sizes = [p.numel() // world for p in params.values()]
        self.shard = torch.zeros(sum(self.sizes))
        self.num_bytes = sum(self.sizes) * world * self.shard.element_size()
        self.storage = torch.UntypedStorage(self.num_bytes)
        starts = [world * sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.rows = [self.over(at, (world, n)) for at, n in zip(starts, self.sizes, strict=True)]
        self.fulls = [
            nn.Parameter(self.over(at, p.shape))
            for at, p in zip(starts, params.values(), strict=True)
        ]
        self.shards = [nn.Parameter(s.view(1, -1)) for s in self.shard.split(self.sizes)]
        self.full_forms = dict(zip(params, self.fulls, strict=True))
        self.sharded_forms = dict(zip(params, self.shards, strict=True))
        self.like = [torch.empty(1, n, device="meta") for n in self.sizes]
        self.num_arrived = 0
        for full in self.fulls:
            full.register_post_accumulate_grad_hook(self.arrived)
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.computed)
        self.release()

    def over(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(0).set_(self.storage, at, shape, (shape[1], 1))

    @torch.no_grad()
    def gather(self, _grad: torch.Tensor | None = None) -> None:
        self.storage.resize_(self.num_bytes)
        staged = torch.empty(self.world, self.shard.numel())
        self.group.all_gather_single(staged.view(-1), self.shard).wait()
        torch.ops.aten.split_with_sizes_copy.out(staged, self.sizes, 1, out=self.rows)
        self.held.update(self.full_forms)

    def release(self) -> None:
        self.held.update(self.sharded_forms)
        self.storage.resize_(0)

    def computed(self, _module: nn.Module, _args: object, out: torch.Tensor) -> None:
        self.release()
        out.register_hook(self.gather)

    def arrived(self, _full: torch.Tensor) -> None:
        self.num_arrived += 1
        if self.num_arrived < len(self.fulls):
            return
        self.num_arrived = 0
        packed = torch.empty(self.world, self.shard.numel())
        grads = [full.grad.view(self.world, -1) for full in self.fulls]
        torch._foreach_copy_(list(packed.split(self.sizes, 1)), grads)
        for full in self.fulls:
            full.grad = None
        total = torch.empty(self.shard.numel())
        self.group.reduce_scatter_single(total, packed.view(-1)).wait()
        total.mul_(1 / self.world)
        parts = torch._utils._unflatten_dense_tensors(total, self.like)
        for shard, part in zip(self.shards, parts, strict=True):
            shard.grad = part
        self.release()
