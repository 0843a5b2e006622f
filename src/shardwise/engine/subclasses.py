"""Parameters whose local tensors say themselves what is gathered (float8, int8, 4-bit subclasses).

FSDP2's contract, kept exactly (torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py):

    fsdp_pre_all_gather(mesh [, outer_size, outer_stride, module, mp_policy]) -> (inputs, metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype)            -> (full tensor, inner tensors)
    fsdp_post_all_gather(outputs, metadata, param_dtype, out=full)  -> nothing, at later gathers

Such parameters lie in a bucket of their own kind. The shard is the subclass instance itself, which
the bucket does not copy; what moves is a payload of bytes,

    payload    | w1: input 0 | w1: input 1 | w2: input 0 | ..   of each rank, any dtypes and sizes

one all-gather for all of them, unpacked into one storage per output, since hooks build wrappers
over them that look at storages and offsets. Outputs and inner tensors are emptied on release and
given memory before the next gather; their version counters move with the state of the bucket.

The payload is made when it is gathered, inside a phase, so the fences of shared memory do not
cover it: these buckets use process groups, gradients included. Gradients reduce as usual.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import foreach_copy, local_of, plain_alias, set_versions
from shardwise.comm.exchange import gather_objects
from shardwise.comm.transport import Bucket, Handle
from shardwise.engine.core.bucket import BucketState, checked_local
from shardwise.engine.core.parameter import ShardedParam
from shardwise.engine.core.stages import grouped_mesh
from shardwise.engine.core.upkeep import owner_of
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.mesh.spread import Spread
from shardwise.errors import DivergenceError, EngineError
from shardwise.layout import ParamSpec, layout_bucket

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor, name: str = "") -> bool:
    """True for a tensor (or the shard of one) with both hooks; AssertionError for one of them."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    pre, post = hasattr(local, _PRE), hasattr(local, _POST)
    if pre != post:
        raise AssertionError(
            f"{name or type(local).__name__}: Both fsdp_pre_all_gather and fsdp_post_all_gather "
            f"should be defined if using all-gather extensions; {type(local).__name__} has "
            f"{_PRE if pre else _POST} only"
        )
    return pre


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a subclass instance consists of; itself for a plain one.

    Nothing for a wrapper that cannot be taken apart (no `__tensor_flatten__`).
    """
    if type(tensor) in (torch.Tensor, nn.Parameter):
        yield tensor.detach()
    elif hasattr(tensor, "__tensor_flatten__"):
        for key in tensor.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor, key))
    elif tensor.is_meta or tensor.untyped_storage().nbytes():
        yield plain_alias(tensor)


@dataclass(slots=True)
class Inputs:
    """What the hook of one parameter gave for a gather."""

    tensors: list[torch.Tensor]
    metadata: Any


class Payload:
    """Where the inputs of all parameters go; made at the first gather, when sizes are known."""

    def __init__(self, state: ExtensionBucket, inputs: list[Inputs]) -> None:
        device, world = state.mesh.device, state.layout.world
        self.sizes = [[t.size() for t in given.tensors] for given in inputs]
        self.dtypes = [[t.dtype for t in given.tensors] for given in inputs]
        specs = [
            ParamSpec(f"{param.name}[{i}]", (world * t.numel() * t.itemsize,), torch.uint8, False)
            for param, given in zip(state.params, inputs, strict=True)
            for i, t in enumerate(given.tensors)
        ]
        layout = layout_bucket(
            specs, gather_dtype=torch.uint8, reduce_dtype=torch.uint8, world=world
        )
        self.bucket: Bucket = state.transport.attach(
            f"{state.name}/payload", layout, torch.device("meta")
        )
        self.layout = layout
        self.outputs = [
            [torch.empty(t.numel() * world, dtype=t.dtype, device=device) for t in given.tensors]
            for given in inputs
        ]
        self._bytes = [t.view(torch.uint8) for given in self.outputs for t in given]
        self._device = device

    def check(self, param: ShardedParam, index: int, given: Inputs) -> None:
        """A hook must give the same sizes and dtypes each time: outputs are made once."""
        found = [t.size() for t in given.tensors]
        if found != self.sizes[index] or [t.dtype for t in given.tensors] != self.dtypes[index]:
            raise EngineError(
                f"{param.name}: fsdp_pre_all_gather gave inputs of sizes "
                f"{[tuple(s) for s in found]}, at the first gather it gave "
                f"{[tuple(s) for s in self.sizes[index]]}; sizes and dtypes must not change"
            )

    def send(self, inputs: list[Inputs]) -> tuple[torch.Tensor, torch.Tensor]:
        """(what this rank sends, where all ranks' bytes arrive), as flat bytes."""
        parts = [
            t.contiguous().view(-1).view(torch.uint8) for given in inputs for t in given.tensors
        ]
        if len(parts) == 1:
            return parts[0], self._bytes[0]
        numel = self.layout.chunk_numel
        shard = torch.empty(numel, dtype=torch.uint8, device=self._device)
        for part, at in zip(parts, self.layout.shard_offsets(0), strict=True):
            shard[at : at + part.numel()].copy_(part)
        return shard, shard.new_empty(self.layout.full_numel)

    def unpack(self, arrived: torch.Tensor) -> None:
        if len(self._bytes) == 1:
            return
        parts = [arrived.narrow(0, p.full_offset, p.numel) for p in self.layout.params]
        foreach_copy(self._bytes, parts)

    def shaped(self, index: int) -> tuple[torch.Tensor, ...]:
        """Outputs of one parameter: the inputs' trailing dims, all ranks' rows."""
        pairs = zip(self.outputs[index], self.sizes[index], strict=True)
        return tuple(flat.view(-1, *size[1:]) for flat, size in pairs)


class _Gathering:
    """The handle of a gather: bytes first, then the hooks that make full parameters of them."""

    def __init__(
        self, state: ExtensionBucket, handle: Handle, arrived: torch.Tensor, inputs: list[Inputs]
    ) -> None:
        self._state: ExtensionBucket | None = state
        self._handle, self._arrived, self._inputs = handle, arrived, inputs

    def wait(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            self._handle.wait()
            state.complete(self._arrived, self._inputs)


class ExtensionBucket(BucketState):
    """See the module docstring."""

    needs = ("takes_bytes",)
    regroups = False  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aliases = False
        self._payload: Payload | None = None
        self._storages: list[tuple[Any, int]] = []  # to empty on release, and their sizes
        self._locals: list[torch.Tensor] = []
        self._owners: dict[str, weakref.ref[nn.Module]] = {}

    @classmethod
    def takes(cls, tensor: torch.Tensor, name: str) -> bool:
        return is_extended(tensor, name)

    @classmethod
    def check_fits(
        cls, name: str, param: nn.Parameter, shard_dim: int, mesh: ShardMesh, spread: Spread
    ) -> None:
        if param.ndim == 0 or shard_dim or spread.whole is not None or spread.own is not None:
            raise NotImplementedError(
                f"{name}: a {type(param).__name__} with fsdp_pre_all_gather is cut along dim 0 and "
                f"lies on no tensor axis, found Shard({shard_dim}) of {param.ndim} dims; leave it "
                "out of the unit with ignored_params otherwise"
            )
        if mesh.splits_replicas:
            raise NotImplementedError(
                f"{name}: its tensor subclass says what is gathered (fsdp_pre_all_gather), which a "
                "strategy that shards in two stages (hybrid_full_optimizer) cannot do yet; use "
                "hybrid_shard for this unit"
            )

    def allocate(self) -> None:
        """Gradients only: shards are the subclass instances, and the payload comes later."""
        self.bucket = self.transport.attach(self.name, self.layout, torch.device("meta"))

    def shard_for(self, index: int, origin: torch.Tensor) -> torch.Tensor:
        """The subclass instance that this rank keeps of `origin`.

        Cut like FSDP2 does, by the operations that such subclasses therefore have: `chunk`,
        `new_zeros`, `narrow` of the whole length, `copy_`.
        """
        param, rank = self.params[index], self.mesh.shard.rank
        if isinstance(origin, DTensor):
            return checked_local(param, origin)
        p = param.layout
        with torch.no_grad():
            whole = origin.detach()
            if not whole.is_meta and whole.device.type != self.mesh.device.type:
                whole = whole.to(self.mesh.device)
            padded = whole.new_zeros((p.cuts.size(0), *p.spec.shape[1:]))
            own = padded.narrow(0, 0, p.cuts.size(rank))
            if p.cuts.size(rank):
                own.copy_(torch.chunk(whole, p.cuts.world)[rank])
        return own

    def fresh_shard(self, index: int) -> torch.Tensor:
        device = self.mesh.device
        return torch.empty_like(local_of(self.params[index].sharded), device=device)

    @torch.inference_mode(False)
    def make_full(self) -> None:
        """Empty stand-ins: the hooks make the full parameters at the first gather."""
        self._payload, self._storages = None, []
        self._locals = [param.local for param in self.params]
        for param in self.params:
            stand_in = torch.empty(0, device=self.mesh.device)
            param.full = nn.Parameter(stand_in, requires_grad=param.sharded.requires_grad)
        self._fulls = ()
        self.forget_forms()

    def is_current(self) -> bool:
        if not self.is_registered():
            return False
        if self.bucket is None:
            return all(param.sharded.is_meta for param in self.params)
        pairs = zip(self.params, self._locals, strict=True)
        return all(
            p.local is local and is_extended(local, p.name) and p.sharded._mark is self.mark  # type: ignore[attr-defined]
            for p, local in pairs
        )

    # -- gathering -------------------------------------------------------------------------------
    def gather(self) -> Handle:
        """Ask the hooks what to send, and send it."""
        with torch.inference_mode(False), torch.no_grad():
            inputs = self._ask()
            assert self._payload is not None and self.bucket is not None
            for storage, size_bytes in self._storages:
                storage.resize_(size_bytes)
            shard, arrived = self._payload.send(inputs)
            if (comm := self.unit().custom_comms.get("all_gather")) is not None:
                self._payload.bucket.use_collective("all_gather", comm)
            handle = self.transport.gather(self._payload.bucket, shard, arrived)
            return _Gathering(self, handle, arrived, inputs)

    def _ask(self) -> list[Inputs]:
        """The inputs of all parameters; ranks agree on their sizes once, at the first gather."""
        if self._payload is not None:
            inputs = [self._pre(param) for param in self.params]
            for i, (param, given) in enumerate(zip(self.params, inputs, strict=True)):
                self._payload.check(param, i, given)
            return inputs
        inputs, failed = [], None
        try:
            inputs = [self._pre(param) for param in self.params]
            found: Any = [[(t.size(), str(t.dtype)) for t in g.tensors] for g in inputs]
        except Exception as error:  # noqa: BLE001 - peers wait: tell them first
            failed, found = error, f"{type(error).__name__}: {error}"
        everybody: list[Any] = [found]
        if self.mesh.shard.size > 1 and self.transport.has_peers:
            group = self.mesh.shard.group
            everybody = gather_objects(found, group, "inputs of extension gathers")
        if failed is not None:
            raise failed
        for rank, theirs in enumerate(everybody):
            if theirs != found:
                raise DivergenceError(
                    f"{self.params[0].name}: fsdp_pre_all_gather gave {found} on rank "
                    f"{self.mesh.shard.rank} of the shard axis and on rank {rank}: {theirs}. All "
                    "ranks must give inputs of the same sizes and dtypes; pad those of a smaller "
                    "shard to the size of the first rank's"
                )
        self._payload = Payload(self, inputs)
        return inputs

    def _pre(self, param: ShardedParam) -> Inputs:
        """Call `fsdp_pre_all_gather` in the form that it is declared in."""
        local: Any = param.local
        if self.offload:
            local = self.streams.to_device(local, self.mesh.device)
        hook = local.fsdp_pre_all_gather
        num = len(inspect.signature(hook).parameters)
        if num not in (1, 5):
            raise AssertionError(
                f"{param.name}: Invalid fsdp_pre_all_gather: {inspect.signature(hook)}\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: "
                "tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        if num == 1:
            tensors, metadata = hook(self.shard_mesh)
        else:
            sharded = param.sharded
            tensors, metadata = hook(
                self.shard_mesh, sharded.size(), sharded.stride(), self._module(param), self.policy
            )
        padded = torch.Size((param.layout.cuts.size(0), *param.layout.spec.shape[1:]))
        if num == 5 and local.size() != padded and any(t.size() != padded for t in tensors):
            raise AssertionError(
                f"{param.name}: unevenly sharded ({param.layout.rows} rows over "
                f"{self.mesh.shard.size} ranks), so fsdp_pre_all_gather must return all-gather "
                f"inputs with the padded sharded size {tuple(padded)}, found "
                f"{[tuple(t.size()) for t in tensors]}; pad them with zeros"
            )
        return Inputs(list(tensors), metadata)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh of the shard axis alone."""
        mesh = self.mesh.mesh
        if not self.mesh.is_sharded:
            return grouped_mesh(self.mesh, 1).mesh
        return mesh if mesh.ndim == 1 else mesh[self.mesh.shard.name]

    def _module(self, param: ShardedParam) -> nn.Module:
        """The module that holds the parameter."""
        ref = self._owners.get(param.name)
        owner = ref() if ref is not None else None
        if owner is None:
            owner = owner_of(self.unit(), param)
            self._owners[param.name] = weakref.ref(owner)
        return owner

    def complete(self, arrived: torch.Tensor, inputs: list[Inputs]) -> None:
        """The bytes are there: make full parameters of them."""
        assert self._payload is not None
        with torch.inference_mode(False), torch.no_grad():
            self._payload.unpack(arrived)
            is_first = not self._storages
            declared: list[torch.Tensor] = []
            for i, (param, given) in enumerate(zip(self.params, inputs, strict=True)):
                if is_first:
                    declared += self._first(param, self._payload.shaped(i), given.metadata)
                else:
                    local: Any = param.local
                    local.fsdp_post_all_gather(
                        self._payload.shaped(i),
                        given.metadata,
                        self.layout.gather_dtype,
                        out=param.full,
                    )
            if is_first:
                self._own(declared)
            self.set_gathered_versions()

    def _first(
        self, param: ShardedParam, outputs: tuple[torch.Tensor, ...], metadata: Any
    ) -> list[torch.Tensor]:
        """The first `fsdp_post_all_gather`: it makes the full parameter."""
        local: Any = param.local
        made, inner = local.fsdp_post_all_gather(outputs, metadata, self.layout.gather_dtype)
        shape = torch.Size(param.layout.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        if made.numel() < prod(shape):
            raise EngineError(
                f"{param.name}: fsdp_post_all_gather made a tensor of shape {tuple(made.shape)}, "
                f"expected at least the {prod(shape)} elements of {tuple(shape)}"
            )
        full = torch.as_strided(made, shape, stride, storage_offset=0)
        param.set_full(full)
        return list(inner)

    def _own(self, declared: list[torch.Tensor]) -> None:
        """Note the storages to empty and the tensors whose versions say so."""
        assert self._payload is not None
        kept = {t.untyped_storage().data_ptr() for p in self.params for t in inner_tensors(p.local)}
        outputs = [t for given in self._payload.outputs for t in given]
        storages = {}
        for t in (*outputs, *declared):
            for plain in inner_tensors(t):
                storage = plain.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in kept:
                    storages[storage.data_ptr()] = storage
        self._storages = [(s, s.nbytes()) for s in storages.values()]
        fulls = [param.full for param in self.params]
        inner = [t for full in fulls for t in inner_tensors(full.data)]
        self._fulls = (*fulls, *declared, *inner, *outputs)
        self.forget_forms()

    def addresses(self) -> list[int]:
        return [storage.data_ptr() for storage, _ in self._storages]

    def count_uses_behind_gather(self) -> None:
        """Hooks may keep what they like; uses are not counted."""

    def count_uses_before(self) -> None:
        """See `count_uses_behind_gather`."""

    def release(self, after: str = "") -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        version = 2 * self.mark.count + 1
        set_versions(self._fulls, (version,) * len(self._fulls))

    @property
    def gathered_bytes(self) -> int:
        return sum(storage.nbytes() for storage, _ in self._storages)

    def written_names(self) -> list[str]:
        if not self._storages:
            return []
        return [p.name for p in self.params if p.full._version != self._versions[0]]
