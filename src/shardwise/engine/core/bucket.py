"""A bucket at run time: the shard buffer, the gathered buffer over one resizable storage, and the
registered parameters.

Gathering writes through `out`, one flat tensor over the storage; every full parameter is a tensor
of its own over the same storage, so its version counter is its own and autograd's saved tensors
stay valid while the storage is emptied and filled again. A released parameter must never be read:
some kernels crash on it. So the version counters move with the state,

    gathered: 2 * writes to the unit        released: 2 * writes + 1

and autograd refuses, with a Python error, to unpack a parameter that is released now, or that was
written since.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import graph_task, local_of, set_versions, storage_uses
from shardwise.comm.blocks import Blocks
from shardwise.comm.streams import streams_for
from shardwise.comm.transport import DONE, Bucket, Handle, Transport
from shardwise.engine.core.guests import Guest, Left
from shardwise.engine.core.parameter import ShardedParam, Slot
from shardwise.engine.core.stages import Home, Part, Stage
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.mesh.spread import Spread
from shardwise.engine.tensor.shard_tensor import Mark, ShardTensor
from shardwise.layout import BucketLayout, MixedPrecisionPolicy, OffloadPolicy, middle_layout

# A thread of the backend that has not let go of a gather yet is no user: this often, 0.1 ms apart.
PATIENCE = 10
# What is asked of all parameters of a bucket is asked by one `map`, which stays in C.
_version = attrgetter("_version")
_shows_shards = attrgetter("shows_shards")
_local = attrgetter("sharded._local_tensor")


class BucketState:
    """Parameters that are gathered and reduced together.

    Parameters that say themselves what is gathered lie in buckets of another kind: a subclass that
    has registered itself (`register_kind`) and `takes` them.
    """

    needs: tuple[str, ...] = ()  # capabilities of a transport that can move this kind

    @classmethod
    def takes(cls, tensor: torch.Tensor, name: str) -> bool:
        """Whether a parameter, or the shard of one, belongs into buckets of this kind."""
        return True

    @classmethod
    def check_fits(
        cls, name: str, param: nn.Parameter, shard_dim: int, mesh: ShardMesh, spread: Spread
    ) -> None:
        """Raise for a parameter that this kind takes and cannot hold."""

    def __init__(
        self,
        name: str,
        layout: BucketLayout,
        params: list[ShardedParam],
        mesh: ShardMesh,
        transport: Transport,
        mark: Mark,
        offload: OffloadPolicy | None = None,
        home: Home | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.params = params
        self.mesh = mesh
        self.transport = transport
        self.mark = mark
        self.policy = MixedPrecisionPolicy()
        self.streams = streams_for(mesh.device)
        apart = self.streams.is_async or mesh.device.type != "cpu"
        self.offload = offload is not None and apart
        self.pins_memory = self.offload and getattr(offload, "pin_memory", False)
        self.unit: Callable[[], Any] = lambda: None  # a weak reference, set by the unit
        self.bucket: Bucket | None = None  # None while the parameters are on the meta device
        self.home = home  # where the registered shards lie, if not in the shard's buffer
        middle = layout if home is None else middle_layout(layout)
        shard = Stage(name, middle, transport, mesh.shard.rank)
        self.stages = [shard] if home is None else [home, shard]  # the first one is registered
        self.part: Part | None = None  # from a forward to its backward
        self.aliases = (
            layout.world == 1 and not layout.needs_cast and not self.offload and home is None
        )
        self._blocks = Blocks.of_process()
        self.num_forms = 0  # how often full or sharded forms were replaced
        self._holders: tuple[Holder, ...] | None = None  # None: parameters or places have changed
        self.between: list[torch.Tensor] = []  # forms over a smaller world, see `stages`
        self.guests: list[Guest] = []  # in the place of parameters for one call
        self.left: list[Left] = []  # guests of calls that are over
        self._registered: tuple[torch.Tensor, ...] = ()  # what the registered shards show
        self._fulls: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()  # of the full parameters when they were gathered
        # Uses of the storage, see `guards.views`: by the engine, the views of the transport among
        # them; by these and autograd before a gather, and behind it.
        self._own_uses = self._num_views = self._uses_before_gather = self._uses_behind_gather = 0
        self._uses_before = 0  # when a backward began

    @property
    def regroups(self) -> bool:
        """Whether `reshard_after_forward=int` keeps parts of it over a smaller world."""
        return self.layout.world > 1

    @property
    def is_changed_by_gather(self) -> bool:
        """Full parameters differ from the registered ones: they are cast, or travel rounded."""
        wire = self.layout.wire
        rounds = wire.shard.gather.is_lossy or wire.replicate.gather.is_lossy
        return rounds or self.layout.needs_cast

    # -- making ----------------------------------------------------------------------------------
    def allocate(self) -> None:
        """Allocate the shard buffer, in memory that the transport can work with."""
        device = torch.device("cpu") if self.offload else self.mesh.device
        *_, shard = self.stages
        self.bucket = shard.allocate(device if self.home is None else self.mesh.device)
        registered = self.bucket if self.home is None else self.home.allocate(device)
        if self.offload:
            registered.buffer = self.streams.on_host(registered.buffer, pinned=self.pins_memory)
            self.stages[0].is_on_host = True

    @property
    def registered(self) -> Bucket | None:
        """What the registered shards are views of; None on the meta device."""
        return self.stages[0].bucket

    @property
    def own_rank(self) -> int:
        """This rank's place among those that share what it has registered."""
        return self.stages[0].rank

    def shard_for(self, index: int, origin: torch.Tensor) -> torch.Tensor:
        """This rank's part of `origin`, which is whole or sharded alike already, in its place."""
        param = self.params[index]
        if origin.is_meta:
            return torch.empty(param.own_shape, dtype=origin.dtype, device="meta")
        local = self.local_view(index)
        with torch.no_grad():
            local.copy_(own_part(param, origin))
        return local

    def fresh_shard(self, index: int) -> torch.Tensor:
        """Memory for a parameter that was on meta until now."""
        return self.local_view(index)

    def local_view(self, index: int) -> torch.Tensor:
        """This rank's part of a parameter, as a view into the buffer of the registered."""
        return own_storage(self.stages[0].rows(index))

    @torch.inference_mode(False)
    def make_full(self) -> None:
        """The (empty) gathered storage and the full parameters over it."""
        layout, device = self.layout, self.mesh.device
        if self.aliases:
            assert self.bucket is not None
            self.storage, start = (
                self.bucket.buffer.untyped_storage(),
                self.bucket.buffer.storage_offset(),
            )
        else:
            self.storage, start = torch.UntypedStorage(0, device=device), 0
            self._blocks.fill(self.storage, layout.full_bytes)
        empty = torch.empty(0, dtype=layout.gather_dtype, device=device)
        self.out = empty.set_(self.storage, start, (layout.full_numel,), (1,))
        for p, param in zip(layout.params, self.params, strict=True):
            full, at = empty.new_empty(0), start + p.full_offset
            shape = torch.Size(p.spec.shape)
            if layout.is_complex:  # not by a view: no full parameter is a view of another tensor
                full, at = full.new_empty(0, dtype=layout.gather_dtype.to_complex()), at // 2
                shape = shape[:-1]
            full.set_(self.storage, at, shape, torch.empty(shape, device="meta").stride())
            param.set_full(param.spread.gathered(full))
        # Autograd saves the outer tensor of a DTensor, or the inner one where a module unwraps it.
        inner = [local_of(p.full) for p in self.params if isinstance(p.full, DTensor)]
        self._fulls = (*(param.full for param in self.params), *inner)
        self.forget_forms()
        self._own_uses, self._num_views = storage_uses(self.storage), 0
        self.release()

    # -- moving ----------------------------------------------------------------------------------
    def gather(self) -> Handle:
        """Fill the gathered storage from all ranks' shards."""
        assert self.bucket is not None
        if self.aliases:
            self.set_gathered_versions()
            return DONE
        self.open_storage()
        self._uses_before_gather = storage_uses(self.storage)
        stage, part = self.stages[-1], self.part
        if part is not None and part.is_kept and part.serves and graph_task() is not None:
            stage = part
        handle = stage.gather(self.out)
        self.set_gathered_versions()
        return handle

    def fill_middle(self, version: int) -> None:
        """Bring the shard up to date from the replicas that share it out."""
        if self.home is not None:
            middle = self.stages[-1]
            self.home.fill(middle).wait()
            middle.version = version

    def make_part(self, world: int, open_on: Callable[[ShardMesh], Transport]) -> None:
        """The stage over a smaller world, where the strategy has one. When the unit is built, not
        at its first use: all ranks make process groups together.
        """
        if self.regroups and self.layout.world > world:
            self.part = Part(self, world, open_on)
            self.between = [p.between for p in self.params if p.between is not None]

    def keep_part(self) -> None:
        if self.part is not None:
            self.part.keep(self.params)

    def drop_part(self) -> None:
        if self.part is not None:
            self.part.is_kept = False

    def open_storage(self) -> None:
        """Memory for the full parameters; what is in it is undefined until a gather fills it."""
        if self.storage.nbytes() == 0:
            self._blocks.fill(self.storage, self.layout.full_bytes)

    def addresses(self) -> list[int]:
        """Where memory that is to be released begins."""
        return [] if self.aliases else [self.storage.data_ptr()]

    def count_uses_behind_gather(self) -> None:
        """Behind a gather: nobody has seen this copy; autograd may keep views of an older one. The
        transport says how many it keeps itself: counted, those of a backend's thread that is not
        done with the collective yet would be among them.
        """
        assert self.bucket is not None
        num_views = self.bucket.views_of(self.out)
        if self.part is not None and self.part.bucket is not None:
            num_views += self.part.bucket.views_of(self.out)
        more, self._num_views = num_views - self._num_views, num_views
        self._own_uses += more
        self._uses_behind_gather = self._uses_before_gather + more

    def count_uses_before(self) -> None:
        """When a backward begins: autograd's views are among them. It sees a write to `aliases`."""
        self._uses_before = storage_uses(self.storage)
        if self.aliases and self._versions[0] != 2 * self.mark.count:
            self.set_gathered_versions()

    def release(self, after: str = "") -> None:
        """Empty the gathered storage. Full parameters must not be read until the next gather.

        `after` a "backward", or a "forward" without grad, views that user code keeps are told from
        autograd's; they keep the memory, and the next gather takes new one.
        """
        if self.aliases:
            return
        if not self.storage.resizable() or (after and self._is_used_elsewhere(after)):
            self._leave_storage()  # numpy() makes a storage one that cannot be resized
        self._blocks.empty(self.storage)
        version = 2 * self.mark.count + 1
        set_versions(self._fulls, (version,) * len(self._fulls))

    def _is_used_elsewhere(self, after: str) -> bool:
        for _ in range(PATIENCE):
            uses = storage_uses(self.storage)
            if after == "forward":
                are_more = uses > self._uses_behind_gather
            else:  # a backward that keeps its graph drops none of autograd's views
                are_more = self._own_uses < uses < self._uses_before
            if not are_more:
                return False
            time.sleep(1e-4)
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _leave_storage(self) -> None:
        """The full parameters move to a storage of their own, the old one stays as it is."""
        old = self.storage
        self.storage = torch.empty(
            old.nbytes(), dtype=torch.uint8, device=self.mesh.device
        ).untyped_storage()
        # Another tensor: transports keep views by it.
        self.out = torch.empty(0, dtype=self.out.dtype, device=self.out.device).set_(
            self.storage, self.out.storage_offset(), self.out.shape, self.out.stride()
        )
        for full in self._fulls:
            if not isinstance(full, DTensor):
                full.data = torch.empty(0, dtype=full.dtype, device=full.device).set_(
                    self.storage, full.storage_offset(), full.shape, full.stride()
                )
        self._own_uses, self._num_views = storage_uses(self.storage), 0

    @property
    def gathered_bytes(self) -> int:
        """Memory of the full parameters, 0 when they are released."""
        return self.layout.full_bytes if not self.aliases and self.storage.nbytes() else 0

    def set_gathered_versions(self) -> None:
        self._versions = versions = (2 * self.mark.count,) * len(self._fulls)
        set_versions(self._fulls, versions)

    def written_names(self) -> list[str]:
        """Parameters whose gathered copy was written in place since the gather."""
        if self.aliases or self.bucket is None:
            return []
        if tuple(map(_version, self._fulls)) == self._versions:
            return []
        version = self._versions[0]
        return [
            p.name
            for p in self.params
            if any(
                t._version != version for t in (p.full, getattr(p.full, "_local_tensor", p.full))
            )
        ]

    def is_current(self) -> bool:
        """True when the registered parameters are the ones over this bucket's buffer."""
        if not self.is_registered():
            return False
        if any(kind_of(param.local, param.name) is not type(self) for param in self.params):
            return False  # hooks were set on the local tensor, say
        registered = self.registered
        if registered is None:
            return all(param.sharded.is_meta for param in self.params)
        return all(param.is_in_place for param in self.params)

    def is_registered(self) -> bool:
        """True when every slot holds a form of its parameter, or a guest, and the sharded forms
        show this bucket's memory: `swap_tensors` gives them that of others.
        """
        if self._registered and not all(map(is_, map(_local, self.params), self._registered)):
            return False
        if all(map(_shows_shards, self._holders or self.holders)):
            return True
        for param in self.params:
            for slot in param.slots:
                held = slot[0].get(slot[1])
                if not param.is_form(held) and not any(g.is_in(slot) for g in self.guests):
                    return False
        return True

    # -- registering -----------------------------------------------------------------------------
    @property
    def holders(self) -> tuple[Holder, ...]:
        """The modules that hold this bucket's parameters."""
        if self._holders is None:
            self._holders = holders_of(self.params)
        return self._holders

    def forget_places(self) -> None:
        """The slots of parameters have changed."""
        self._holders = None

    def forget_forms(self) -> None:
        """Full or sharded forms are others than before."""
        self._holders = None
        self._registered = tuple(map(_local, self.params))
        self.num_forms += 1

    def register_full(self) -> None:
        guests = self._present_guests() if self.guests else ()
        for holder in self._holders or self.holders:
            holder.parameters.update(holder.full)
        for guest in guests:
            guest.serve()

    def register_sharded(self) -> None:
        guests = self._present_guests() if self.guests else ()
        for holder in self._holders or self.holders:
            holder.parameters.update(holder.sharded)
        for guest in guests:
            guest.rest()

    @property
    def guest_slots(self) -> list[Slot]:
        return [guest.slot for guest in self.guests]

    def register_between(self) -> None:
        """Shards over a smaller world, of those parameters that have them."""
        guests = self._present_guests() if self.guests else ()
        for param in self.params:
            if param.between is not None:
                for parameters, name in param.slots:
                    parameters[name] = param.between
        for guest in guests:
            guest.rest()

    def _present_guests(self) -> list[Guest]:
        self.guests = [g for g in self.guests if g.is_in(g.slot)]
        return self.guests


_kinds: list[type[BucketState]] = [BucketState]


def register_kind(kind: type[BucketState]) -> None:
    """From now on, parameters that `kind` takes lie in its buckets."""
    _kinds.insert(0, kind)


def kind_of(tensor: torch.Tensor, name: str) -> type[BucketState]:
    """The kind of bucket that a parameter, or the shard of one, belongs into."""
    return next(kind for kind in _kinds if kind.takes(tensor, name))


@torch.inference_mode(False)
def own_storage(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: tools take tensors of one storage for tied ones, and
    `torch.save` writes storages whole. A part without elements gets some memory, for its address.
    """
    if part.is_meta or type(part) is not torch.Tensor:
        return part
    if not part.numel():
        return part.new_empty(1)[:0].view(part.shape)
    flat = torch.from_dlpack(part.detach().reshape(-1).view(torch.uint8))
    return flat.view(part.dtype).view(part.shape)


def lies_over(tensor: torch.Tensor, addresses: set[int]) -> bool:
    """Whether a tensor's memory begins at one of the addresses."""
    try:
        return tensor.untyped_storage().data_ptr() in addresses
    except (NotImplementedError, RuntimeError):  # meta, sparse, subclasses without storage
        return False


def own_part(param: ShardedParam, origin: torch.Tensor) -> torch.Tensor:
    """This rank's rows of `origin`, which is whole, in the gathered form, or sharded alike
    already.
    """
    spread = param.spread
    if isinstance(origin, DTensor):
        if type(origin) is not ShardTensor and spread.is_gathered_form(origin):
            return _rows(param, local_of(origin))
        if type(origin) is ShardTensor and origin.placements != spread.placements:  # computed
            return _rows(param, origin.detach().full_tensor())  # type: ignore[attr-defined]
        return checked_local(param, origin).detach()
    if spread.whole is not None and origin.shape != spread.shape:
        raise ValueError(
            f"{param.name}: replaced by a plain tensor of shape {tuple(origin.shape)}, "
            f"expected the full {tuple(spread.shape)}, of which every rank takes its part"
        )
    return _rows(param, spread.own_part(origin))


def _rows(param: ShardedParam, own: torch.Tensor) -> torch.Tensor:
    if own.ndim == 0:
        return own.detach()
    return own.detach().narrow(param.layout.spec.shard_dim, *param.rows)


def checked_local(param: ShardedParam, origin: DTensor) -> torch.Tensor:
    """The part of a parameter that is sharded already, like this rank's."""
    local, shape = local_of(origin), param.own_shape
    if tuple(local.shape) != shape:
        raise ValueError(
            f"{param.name}: replaced by a DTensor with placements {origin.placements} and a "
            f"local part of shape {tuple(local.shape)}, expected {shape}; distribute it like "
            "the one it replaces"
        )
    return local


@dataclass(frozen=True, slots=True)
class Holder:
    """One module's `_parameters`, and under which names it holds what, in both forms.

    All parameters of a bucket change form together, several times a step. So each module's
    `_parameters` is written by one `dict.update`, and compared by one pass in C; what is written is
    made once and holds until parameters or places change.
    """

    parameters: dict[str, Any]
    sharded: dict[str, nn.Parameter]
    full: dict[str, nn.Parameter]

    @property
    def shows_shards(self) -> bool:
        """The usual state between steps."""
        held = map(self.parameters.get, self.sharded)
        return all(map(is_, held, self.sharded.values()))


def holders_of(params: list[ShardedParam]) -> tuple[Holder, ...]:
    """One for each module that holds any of `params`; tied parameters are in several."""
    found: dict[int, Holder] = {}
    for param in params:
        for parameters, name in param.slots:
            holder = found.setdefault(id(parameters), Holder(parameters, {}, {}))
            holder.sharded[name] = param.sharded
            holder.full[name] = param.full
    return tuple(found.values())
