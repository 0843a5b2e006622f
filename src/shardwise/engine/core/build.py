"""Building a unit: which parameters it manages, their layout, and moving them into their shard
buffer.

The same path serves the first time and every later one (`to`, `to_empty`,
`load_state_dict(assign=True)`, parameters set anew): what the modules hold is laid out and moved,
whether it is a plain tensor, a shard, or on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise.comm.choose import ANYWHERE, open_transport
from shardwise.comm.streams import streams_for
from shardwise.comm.transport import Axis, Transport
from shardwise.engine.core.bucket import BucketState, kind_of, own_part
from shardwise.engine.core.parameter import Belongings, ShardedParam, Slot, home_of
from shardwise.engine.core.stages import Home
from shardwise.engine.mesh.axes import ShardMesh, no_axis
from shardwise.engine.mesh.placing import Place
from shardwise.engine.mesh.spread import Spread, spread_of
from shardwise.engine.tensor.shard_tensor import Mark, ShardTensor
from shardwise.errors import EngineError
from shardwise.layout import (
    BucketLayout,
    Cuts,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamSpec,
    Strategy,
    Wire,
    layout_unit,
)
from shardwise.layout.policy import goes_with_stats

Tie = tuple[ShardedParam, Slot]


@dataclass(slots=True)
class Found:
    """A parameter to manage: its name, what the modules hold now, where they hold it, along which
    dim it is cut over which mesh, and how it lies then.
    """

    name: str
    param: nn.Parameter
    slots: list[Slot]
    shard_dim: int
    mesh: ShardMesh
    spread: Spread
    keeps_dtype: bool = False  # see `goes_with_stats`
    belongings: Belongings | None = None  # of the parameter, if it was managed before

    @property
    def cuts(self) -> Cuts | None:
        """Where its rows are cut, if not evenly."""
        own = self.spread.own
        if own is None:
            return None
        return own.cuts(self.spread.own_shape[own.dim], self.mesh.shard.size)

    @classmethod
    def again(cls, known: ShardedParam, held: nn.Parameter, slots: list[Slot]) -> Found:
        """A parameter that is managed already, where modules now hold `held`."""
        dim, mesh, spread = known.layout.spec.shard_dim, known.mesh, known.spread
        is_new = held.device_mesh != spread.mesh if isinstance(held, DTensor) else not spread.whole
        if is_new and not (isinstance(held, DTensor) and spread.is_gathered_form(held)):
            spread = spread_of(known.name, held, dim, mesh, spread.own)
        belongings = known.belongings if known.is_form(held) else None
        keeps_dtype = known.layout.spec.keeps_dtype
        return cls(known.name, held, slots, dim, mesh, spread, keeps_dtype, belongings)


@dataclass(frozen=True, slots=True)
class Plan:
    """What `fully_shard` was asked for, as far as buckets depend on it."""

    mesh: ShardMesh
    transport: Transport
    policy: MixedPrecisionPolicy
    strategy: Strategy
    offload: OffloadPolicy | None
    transport_name: str | Transport = "auto"
    place_of: Callable[[str, nn.Parameter], Place] = field(kw_only=True)
    wire: Wire = field(kw_only=True)

    def for_kind(self, kind: type[BucketState]) -> Plan:
        """The same over a transport that can move buckets of this kind."""
        can = all(getattr(self.transport, need) for need in kind.needs)
        return self if can else self.on_transport(ANYWHERE)

    def on_transport(self, name: str) -> Plan:
        """The same on another transport."""
        plan = replace(self, transport_name=name)
        return replace(plan, transport=plan.open(self.mesh))

    def open(self, mesh: ShardMesh) -> Transport:
        """The transport of the same kind on another mesh."""
        return open_transport(self.transport_name, mesh.shard, mesh.replicate, mesh.device)

    def home_of(self, name: str, layout: BucketLayout, mesh: ShardMesh) -> Home | None:
        """Where a bucket's registered shards lie, if replicas share them out."""
        if not mesh.splits_replicas:
            return None
        if not isinstance(self.transport_name, str):
            raise NotImplementedError(
                f"{name}: {self.strategy.name} moves shards over two meshes, and a transport "
                "object serves one; pass a transport by name, or use hybrid_shard"
            )
        alone = no_axis("")
        transport = open_transport(
            self.transport_name, mesh.replicate, alone, mesh.device, mesh=mesh.axes
        )
        return Home(name, layout, mesh, transport)


def find_params(
    modules: list[nn.Module],
    ignored: set[int],
    place_of: Callable[[str, nn.Parameter], Place],
    is_sharded: Callable[[nn.Module], bool],
) -> tuple[list[Found], list[Tie]]:
    """Parameters in module order; a tied parameter appears once, with all its slots.

    Slots that hold a parameter of a unit made before are ties to that unit.
    """
    found: dict[int, Found] = {}
    ties: list[Tie] = []
    for position, module in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for name, owner in own_modules(module, prefix, is_sharded):
            for key, param in owner._parameters.items():
                if param is None or id(param) in ignored or isinstance(param, ShardTensor):
                    continue
                home = home_of(param)
                if home is not None:  # tied to a parameter of another unit
                    ties.append((home, (owner._parameters, key)))
                    continue
                if id(param) not in found:
                    full_name = f"{name}{key}"
                    dim, mesh, own = place_of(full_name, param)
                    spread = spread_of(full_name, param, dim, mesh, own)
                    keeps = goes_with_stats(param, owner._buffers)
                    found[id(param)] = Found(full_name, param, [], dim, mesh, spread, keeps)
                slots = found[id(param)].slots
                if all(s[0] is not owner._parameters or s[1] != key for s in slots):
                    slots.append((owner._parameters, key))
    return list(found.values()), ties


def own_modules(
    module: nn.Module, prefix: str, is_sharded: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """`module` and what is below it, without sub-modules that are sharded themselves."""
    yield prefix, module
    for name, child in module.named_children():
        if not is_sharded(child):
            yield from own_modules(child, f"{prefix}{name}.", is_sharded)


def build_buckets(unit_name: str, found: list[Found], plan: Plan, mark: Mark) -> list[BucketState]:
    """Lay out, allocate, move, register; mesh by mesh, the unit's own first."""
    groups: dict[tuple[tuple[Axis, Axis], type[BucketState]], list[Found]]
    groups = {(plan.mesh.axes, BucketState): []}
    for f in found:
        kind = kind_of(f.param, f.name)
        kind.check_fits(f.name, f.param, f.shard_dim, f.mesh, f.spread)
        groups.setdefault((f.mesh.axes, kind), []).append(f)
    return [
        bucket
        for (_, kind), group in groups.items()
        if group
        for bucket in _buckets_on(unit_name, group, plan, mark, kind)
    ]


def _buckets_on(
    unit_name: str,
    found: list[Found],
    plan: Plan,
    mark: Mark,
    kind: type[BucketState],
) -> list[BucketState]:
    """The buckets of parameters that share a mesh."""
    specs = [
        ParamSpec.of(
            f.name,
            f.spread.own_shape,
            f.param,
            shard_dim=f.shard_dim,
            cuts=f.cuts,
            keeps_dtype=f.keeps_dtype,
        )
        for f in found
    ]
    plan, mesh = plan.for_kind(kind), found[0].mesh
    transport = plan.transport if mesh.axes == plan.mesh.axes else plan.open(mesh)
    layout = layout_unit(
        unit_name,
        specs,
        strategy=plan.strategy,
        policy=plan.policy,
        world=mesh.shard.size,
        replicas=mesh.replicate.size,
        on_accelerator=streams_for(mesh.device).is_async,
        wire=plan.wire,
    )
    by_name = {f.name: f for f in found}
    buckets = []
    for bucket_layout in layout.buckets:
        members = [by_name[p.name] for p in bucket_layout.params]
        params = [
            ShardedParam(f.name, p, f.slots, f.mesh, f.spread, mark)
            for f, p in zip(members, bucket_layout.params, strict=True)
        ]
        for f, param in zip(members, params, strict=True):
            param.belongings = f.belongings
        label = f"{unit_name}:{members[0].name}"
        home = plan.home_of(label, bucket_layout, mesh)
        bucket = kind(label, bucket_layout, params, mesh, transport, mark, plan.offload, home)
        bucket.policy = plan.policy
        fill_bucket(bucket, [f.param for f in members])
        buckets.append(bucket)
    return buckets


def fill_bucket(bucket: BucketState, origins: list[nn.Parameter]) -> None:
    """Bring this rank's parts into the bucket and register parameters over them. Meta stays
    meta.
    """
    is_meta = any(o.is_meta for o in origins)
    if not is_meta:
        bucket.allocate()
    for i, (param, origin) in enumerate(zip(bucket.params, origins, strict=True)):
        _register(param, bucket.shard_for(i, origin), origin)
    bucket.register_sharded()
    if not is_meta:
        bucket.make_full()


def check_tie(param: ShardedParam) -> None:
    """Raise when modules that shared a parameter hold different values now: only one can win."""
    held = {id(t): t for parameters, key in param.slots if (t := parameters.get(key)) is not None}
    for form in (param.full, param.between):
        if held.pop(id(form), None) is not None:
            held[id(param.sharded)] = param.sharded
    if len(held) < 2 or any(t.is_meta for t in held.values()):
        return
    first, *others = held.values()
    part = own_part(param, first)
    if not all(torch.equal(part, own_part(param, other)) for other in others):
        raise EngineError(
            f"{param.name}: {len(param.slots)} modules hold this weight, which were one parameter "
            "when they were sharded, and their values differ now. Assign one tensor to all of them "
            "(call tie_weights() after loading), or untie them before fully_shard"
        )


def _register(param: ShardedParam, local: torch.Tensor, origin: nn.Parameter) -> None:
    """Keep the parameter object when it is one of ours: optimizers hold it."""
    if (
        type(origin) is ShardTensor
        and origin.device.type == local.device.type
        and not local.is_meta
    ):
        param.adopt_sharded(local, origin)
    else:
        param.make_sharded(local, origin)


def move_buffers(
    modules: list[nn.Module], device: torch.device, is_sharded: Callable[[nn.Module], bool]
) -> None:
    """Buffers follow the mesh's device; those on meta wait for materialisation."""
    for module in modules:
        for _, owner in own_modules(module, "", is_sharded):
            for key, buffer in owner._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    owner._buffers[key] = buffer.to(device)
