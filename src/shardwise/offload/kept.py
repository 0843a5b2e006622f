"""What an optimizer keeps of its parameters: entries, cut into chunks, in a store.

    pieces   the local part of one slot, chunk by chunk, for whoever writes a checkpoint
    put      state from elsewhere, chunk by chunk, for whoever reads one

Neither holds more than a chunk. `StateView` shows the same as `optimizer.state`, which torch's own
`state_dict` and others read; there each value is a copy of a parameter's whole local part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import local_of
from shardwise.engine.tensor.shard_tensor import wrap_like
from shardwise.offload.chunks import MASTER, Chunk, Entry, Piece, Slot, cut
from shardwise.offload.stores import Store


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """One slot of a parameter, where it lies.

    like: a tensor of its shape, dtype and layout over the ranks, on the meta device.
    pieces: this rank's part, in order, as flat tensors in host memory; each is valid until the next
    one is asked for.
    """

    like: Tensor
    pieces: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True, slots=True)
class SlotSource:
    """One slot of a parameter that is to be read from elsewhere; `read` copies the elements from
    `start` on of this rank's part into a flat tensor in host memory."""

    read: Callable[[int, Tensor], None]


class Kept:
    """The state of all parameters of one optimizer on this rank."""

    def __init__(self, store: Store, chunk_bytes: int) -> None:
        self.store, self._chunk_bytes = store, chunk_bytes
        self.entries: dict[Tensor, Entry] = {}
        self.chunks: list[Chunk] = []

    def add(self, entries: list[Entry]) -> None:
        made = cut(entries, self._chunk_bytes, len(self.chunks))
        self.store.add(made)
        self.chunks += made
        self.entries.update((entry.parameter, entry) for entry in entries)

    def chunks_of(self, parameters: Mapping[Tensor, Any]) -> list[Chunk]:
        """In which their state lies, in the order of the store."""
        found = {c.index: c for p in parameters for c in self.entries[p].chunks}
        return [found[index] for index in sorted(found)]

    # -- out -------------------------------------------------------------------------------------
    def pieces(self, entry: Entry, slot: Slot) -> Iterator[Tensor]:
        for chunk in entry.chunks:
            piece = chunk.piece_of(entry)
            yield chunk.in_section(self.store.section(chunk, slot).cpu(), slot, piece)

    def stored(self, entry: Entry) -> dict[str, Any]:
        """Slots where they lie, the other values as they are."""
        local = local_part_of(entry.parameter)
        slots = {
            s.name: StoredSlot(
                wrap_like(torch.empty_like(local, dtype=s.dtype, device="meta"), entry.parameter),
                lambda s=s: self.pieces(entry, s),  # type: ignore[misc]
            )
            for s in entry.slots
        }
        return {**entry.scalars, **slots}

    def whole(self, entry: Entry) -> dict[str, Any]:
        """As torch's optimizers hold it: copies, laid out like the parameter."""
        local = local_part_of(entry.parameter)
        slots = {}
        for slot in entry.slots:
            flat = torch.empty(entry.numel, dtype=slot.dtype, device=local.device)
            at = 0
            for piece in self.pieces(entry, slot):
                flat[at : at + len(piece)].copy_(piece)
                at += len(piece)
            slots[slot.name] = wrap_like(flat.view(local.shape), entry.parameter)
        return {**entry.scalars, **slots}

    # -- in --------------------------------------------------------------------------------------
    @torch.no_grad()
    def put(self, values: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """The state of these parameters from now on; a parameter with none has none."""
        slots = {p: _slots_in(self.entries[p], given) for p, given in values.items() if given}
        for parameter in values:
            self.entries[parameter].has_state = False
        chunks = self.chunks_of(slots)
        visits = [(c, any(p.entry.has_state for p in c.pieces)) for c in chunks]
        for (chunk, _), memory in zip(visits, self.store.stream(visits), strict=True):
            for piece in chunk.pieces:
                if (given := slots.get(piece.entry.parameter)) is not None:
                    for name, target in chunk.views(memory, piece).items():
                        _copy_in(given.get(name), target, piece)
        self.store.flush()
        for parameter in slots:
            entry, given = self.entries[parameter], values[parameter]
            entry.has_state, entry.lacks_master = True, MASTER not in given
            entry.scalars = {k: copied(v) for k, v in given.items() if entry.slot(k) is None}


def _slots_in(entry: Entry, given: Mapping[str, Any]) -> dict[str, SlotSource]:
    """The values of slots among what is given; ValueError where it is not what is kept."""
    found: dict[str, SlotSource] = {}
    for name, value in given.items():
        if entry.slot(name) is not None:
            found[name] = value if isinstance(value, SlotSource) else _source_of(value)
        elif isinstance(value, SlotSource) or (isinstance(value, Tensor) and value.ndim):
            hint = "; build it with master_weights=True" if name == MASTER else ""
            raise ValueError(
                f"{entry.name}: the state that is loaded has {name!r}, which this optimizer does "
                f"not keep{hint}"
            )
    needed = [s.name for s in entry.slots if s.name != MASTER]
    if lost := [name for name in needed if name not in found]:
        raise ValueError(
            f"{entry.name}: the state that is loaded has no {lost[0]!r}, which this optimizer "
            "keeps; load one that was written with the same options"
        )
    return found


def _source_of(value: Tensor) -> SlotSource:
    flat = (local_of(value) if isinstance(value, DTensor) else value).detach().reshape(-1)
    return SlotSource(lambda start, out: out.copy_(flat[start : start + len(out)]))  # type: ignore[arg-type,func-returns-value]


def _copy_in(source: SlotSource | None, target: Tensor, piece: Piece) -> None:
    if source is None:
        target.zero_()
    elif target.device.type == "cpu":
        source.read(piece.start, target)
    else:
        read = torch.empty(target.shape, dtype=target.dtype)
        source.read(piece.start, read)
        target.copy_(read)


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def local_part_of(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, sharded or not."""
    return (local_of(parameter) if isinstance(parameter, DTensor) else parameter).detach()


def name_of(parameter: Tensor) -> str:
    return getattr(parameter, "_param_name", "") or f"a parameter of shape {tuple(parameter.shape)}"


def gradient_of(parameter: Tensor) -> Tensor:
    """This rank's part of `.grad`, flat."""
    gradient: Any = parameter.grad
    if gradient.layout is not torch.strided:
        raise ValueError(f"{name_of(parameter)}: its gradient is sparse; use dense gradients")
    both = isinstance(gradient, DTensor) and isinstance(parameter, DTensor)
    if both and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part_of(gradient).reshape(-1)


class StateView(MutableMapping[Tensor, Any]):
    """`optimizer.state`: what is read is a copy, what is set is kept. What is written to a copy is
    not."""

    def __init__(self, kept: Callable[[], Kept]) -> None:
        self._kept = kept

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        return self._kept().whole(self._entry(parameter))

    def _entry(self, parameter: Tensor) -> Entry:
        entry = self._kept().entries.get(parameter)
        if entry is None or not entry.has_state:
            raise KeyError(parameter)
        return entry

    def __setitem__(self, parameter: Tensor, slots: Mapping[str, Any]) -> None:
        self._kept().put({parameter: slots})

    def __delitem__(self, parameter: Tensor) -> None:
        self._entry(parameter).has_state = False

    def __iter__(self) -> Iterator[Tensor]:
        return (p for p, entry in self._kept().entries.items() if entry.has_state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        entry = self._kept().entries.get(parameter) if isinstance(parameter, Tensor) else None
        return entry is not None and entry.has_state
