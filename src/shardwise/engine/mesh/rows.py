"""Which rows of a tensor a rank owns under a placement: the one answer that layout, initialisation,
loading and checkpoints go by.

`Shard` cuts as torch.chunk does. A placement of one's own is a subclass of `RowShard` that says
where it cuts: at multiples of a quantization block, or not at all, so that an optimizer finds whole
matrices. It is no `torch.distributed.tensor.Shard`, which operators and redistribution take for
torch.chunk's cut: what torch would compute wrongly with it, it refuses, and `ShardTensor` computes
with the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from shardwise._torch_compat import is_strided_shard
from shardwise.layout import Cuts


class RowShard(Placement):
    """A dim that is cut among the ranks of a mesh dim as `cuts` says; `shard_placement_fn` may
    return one for plain parameters. Subclasses with settings of their own keep them as attributes:
    two placements are equal where these are.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def cuts(self, rows: int, world: int) -> Cuts:
        """Where `rows` rows are cut among `world` ranks; the same on all ranks."""
        raise NotImplementedError(f"{type(self).__name__}.cuts")

    def on(self, dim: int) -> RowShard:
        """The same along another dim."""
        return _made(type(self), {**vars(self), "dim": dim})

    def __reduce__(self) -> Any:
        return _made, (type(self), vars(self))

    def __eq__(self, other: object, /) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), tuple(vars(self).items())))

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


def _made(kind: type[RowShard], settings: dict[str, Any]) -> RowShard:
    """Torch's placements are objects of C++: begun by their `__init__`, and never pickled."""
    new = kind.__new__(kind)
    Placement.__init__(new)
    new.__dict__.update(settings)
    return new


def cuts_dim(placement: Any) -> int | None:
    """The dim that a placement cuts; None for one that cuts none."""
    if isinstance(placement, Shard | RowShard) or is_strided_shard(placement):
        return placement.dim  # type: ignore[attr-defined]
    return None


def rows_of(placement: Any, rows: int, world: int) -> Cuts | None:
    """Where a placement cuts a dim of `rows` rows among `world` ranks; None if it cuts none."""
    if isinstance(placement, RowShard):
        return placement.cuts(rows, world)
    return None if cuts_dim(placement) is None else Cuts.even(rows, world)


def own_box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a tensor begins in each dim, and its size: cut mesh dim by mesh
    dim; strided shards come after the dims that have cut before them.
    """
    start, size = [0] * len(shape), list(shape)
    for i in sorted(range(len(placements)), key=lambda i: is_strided_shard(placements[i])):
        dim = cuts_dim(placements[i])
        if dim is None:
            continue
        cuts = rows_of(placements[i], size[dim], mesh.size(i))
        assert cuts is not None
        rank = mesh.get_local_rank(i)
        start[dim] += cuts.start(rank)
        size[dim] = cuts.size(rank)
    return tuple(start), tuple(size)


def part_of(
    whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    """This rank's part of a full tensor, as a view."""
    for dim, (start, size) in enumerate(zip(*own_box(whole.shape, mesh, placements), strict=True)):
        whole = whole.narrow(dim, start, size) if size != whole.size(dim) else whole
    return whole
