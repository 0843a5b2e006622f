"""What is stepped by one rank: a whole parameter, or a matrix of a stack.

    Team     the ranks that share a parameter: those of its mesh
    Piece    what one of them has whole for a step, and which rows of it lie where
    rounds   pieces in the order in which they are stepped, one of each owner at a time

The rows of a piece come to its owner from the ranks of one replica, its own; all replicas' ranks
get theirs back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise._torch_compat import flattened_mesh, is_strided_shard
from shardwise.comm.groups import on_host
from shardwise.engine.mesh.own_rows import BlockRows, WholeOn, share_out, work_of
from shardwise.engine.mesh.rows import cuts_dim, rows_of
from shardwise.layout import Cuts


class Team:
    """All ranks of a mesh, numbered as the mesh has them; `cut` is the mesh dim over which
    parameters are cut, None where all ranks have them whole.
    """

    def __init__(self, mesh: DeviceMesh, cut: int | None, device: torch.device) -> None:
        self.mesh, self.cut = mesh, cut
        ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
        self.size, self.rank = len(ranks), ranks.index(dist.get_rank())
        whole = mesh if mesh.ndim == 1 else flattened_mesh(mesh)
        self.group: dist.ProcessGroup | None = whole.get_group()
        self.device = device  # where parameters lie; on the host perhaps, though the mesh does not
        if device.type == "cpu":
            self.group, _ = on_host(ranks, self.group, torch.device(mesh.device_type))
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        # `order[i]`: which of the team member i of the group is.
        self.order = [ranks.index(r) for r in members]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        found = []
        for size in reversed(self.mesh.mesh.shape):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))

    def place(self, rank: int) -> int:
        """Which of the parts of a parameter a rank has."""
        return 0 if self.cut is None else self.coordinates(rank)[self.cut]

    @property
    def num_places(self) -> int:
        return 1 if self.cut is None else self.mesh.size(self.cut)

    def sender(self, place: int, owner: int) -> int:
        """Who brings a part to an owner: itself, else a rank of its replica."""
        if self.cut is None:
            return owner
        at = list(self.coordinates(owner))
        at[self.cut] = place
        number = 0
        for size, coordinate in zip(self.mesh.mesh.shape, at, strict=True):
            number = number * size + coordinate
        return number


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`index`: of the matrix in its stack, None for a whole parameter. `cuts`: None where every
    rank has all of it; they are of `dim`, or (None) of the stack, whose matrices stay whole.
    """

    parameter: Tensor
    index: int | None
    shape: torch.Size
    owner: int
    dim: int | None
    cuts: Cuts | None

    def span(self, place: int) -> tuple[int, int]:
        """First row and number of rows of a place, along `dim`; of a stack that is cut into
        matrices all rows or none.
        """
        if self.cuts is None:
            return 0, self.shape[0] if self.shape else 1
        if self.dim is None:
            assert self.index is not None
            has = self.cuts.start(place) <= self.index < self.cuts.stop(place)
            return 0, self.shape[0] if has else 0
        return self.cuts.start(place), self.cuts.size(place)

    def numel(self, place: int) -> int:
        if self.cuts is None:
            return math.prod(self.shape)
        along = 0 if self.dim is None else self.dim
        rest = math.prod(self.shape[:along]) * math.prod(self.shape[along + 1 :])
        return self.span(place)[1] * rest

    def of_local(self, local: Tensor, place: int) -> Tensor:
        """The rows of it that a place has, as a view of its part of the parameter."""
        if self.index is None:
            return local
        first = self.cuts.start(place) if self.dim is None and self.cuts is not None else 0
        return local[self.index - first]

    def of_whole(self, whole: Tensor, place: int) -> Tensor:
        """The same rows, as a view of the whole piece."""
        if self.cuts is None or self.dim is None:
            return whole
        return whole.narrow(self.dim, *self.span(place))

    def is_at_home(self, team: Team) -> bool:
        """Whether the owner has all of it already, and nobody else any."""
        if self.cuts is None:
            return team.size == 1
        home = team.place(self.owner)
        alone = all(not self.numel(p) for p in range(team.num_places) if p != home)
        return alone and team.size == team.num_places


def cut_of(parameter: DTensor, name: str) -> tuple[int | None, int | None, Cuts | None]:
    """Mesh dim, tensor dim and cuts of a parameter.

    Raises:
        ValueError: it is cut over more than one mesh dim.
    """
    over = [i for i, p in enumerate(parameter.placements) if cuts_dim(p) is not None]
    over = [i for i in over if parameter.device_mesh.size(i) > 1] or over[:1]
    if len(over) > 1 or any(is_strided_shard(parameter.placements[i]) for i in over):
        raise ValueError(
            f"{name}: is cut over several mesh dims ({parameter.placements}), so no rank can be "
            "given whole matrices; use full_shard or hybrid_shard without tensor parallelism, or "
            "an element-wise optimizer for it"
        )
    if any(p.is_partial() for p in parameter.placements):
        raise ValueError(
            f"{name}: is a sum over ranks that is not reduced ({parameter.placements})"
        )
    if not over:
        return None, None, None
    placement = parameter.placements[over[0]]
    dim = cuts_dim(placement)
    assert dim is not None
    dim %= parameter.ndim
    cuts = rows_of(placement, parameter.shape[dim], parameter.device_mesh.size(over[0]))
    return over[0], dim, cuts


def pieces_of(
    parameters: Sequence[tuple[DTensor, str]], team: Team, splits: set[int]
) -> list[Piece]:
    """Of the parameters of one team, with owners: whoever has all of it, else by work and bytes.
    `splits`: ids of those that are stacks of matrices.
    """
    found: list[tuple[DTensor, int | None, torch.Size, int | None, Cuts | None, int | None]] = []
    load = [[0, 0] for _ in range(team.size)]

    def take(owner: int, shape: torch.Size) -> None:
        load[owner][0] += work_of(shape)
        load[owner][1] += math.prod(shape)

    for parameter, name in parameters:
        _, dim, cuts = cut_of(parameter, name)
        if id(parameter) in splits:
            shape = parameter.shape[1:]
            along = None if not dim else dim - 1
            for rank in range(team.size):
                start, size = stack_part(team, parameter.shape[0], rank)
                for index in range(start, start + size):
                    take(rank, shape)
                    found.append((parameter, index, shape, along, cuts, rank))
            continue
        holders = [] if cuts is None else [p for p in range(cuts.world) if cuts.size(p)]
        forced = None
        if len(holders) == 1 and team.num_places > 1:
            forced = team.sender(holders[0], 0)
            take(forced, parameter.shape)
        found.append((parameter, None, parameter.shape, dim, cuts, forced))
    free = [entry for entry in found if entry[-1] is None]
    chosen = iter(share_out([entry[2] for entry in free], team.size, [(w, b) for w, b in load]))
    return [
        Piece(p, index, shape, next(chosen) if owner is None else owner, dim, cuts)
        for p, index, shape, dim, cuts, owner in found
    ]


def stack_part(team: Team, num_matrices: int, rank: int) -> tuple[int, int]:
    """First matrix and number of those that a rank steps: as `Shard(0)` on all mesh dims cuts."""
    start, size = 0, num_matrices
    for ranks, at in zip(team.mesh.mesh.shape, team.coordinates(rank), strict=True):
        cuts = Cuts.even(size, ranks)
        start, size = start + cuts.start(at), cuts.size(at)
    return start, size


def rounds(pieces: Sequence[Piece], size: int) -> list[dict[int, Piece]]:
    """By owner, the most work first, so that owners work beside each other for about as long."""
    own: list[list[Piece]] = [[] for _ in range(size)]
    for piece in sorted(pieces, key=lambda p: -work_of(p.shape)):
        own[piece.owner].append(piece)
    longest = max(map(len, own), default=0)
    return [{r: own[r][k] for r in range(size) if k < len(own[r])} for k in range(longest)]


def state_placements(team: Team, piece: Piece) -> tuple[Placement, ...]:
    """Where state lies: on the owner; of a stack, on the owners of its matrices."""
    if piece.index is not None and team.mesh.ndim == 1:
        return (Shard(0),)
    if piece.index is not None:  # torch 2.13 joins uneven `Shard(0)` of several dims as of one
        return (BlockRows(0, 1),) * team.mesh.ndim
    return tuple(WholeOn(at) for at in team.coordinates(piece.owner))
