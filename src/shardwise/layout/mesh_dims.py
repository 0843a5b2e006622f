"""Which dims of a mesh are data parallel, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data parallel dims of a mesh that parameters, as DTensors, lie on already.

    Attributes:
        shard: dim, or dims that act as one, over which parameters are sharded.
        replicate: dim, or dims that act as one, over which they are replicated.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims; name the "
                "data parallel dims of the mesh, e.g. DataParallelMeshDims(shard='dp')"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
