"""`OffloadedOptimizer`: one whose state lies in host memory or in files instead of on the device.

    optimizer = shardwise.OffloadedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), state="nvme", directory="/local/offload"
    )

A step goes through the state chunk by chunk: what is there of a chunk is brought, the wrapped
optimizer's own kernel runs on views of it, and it goes back; with files the next chunks are read
and the last ones written meanwhile. So its memory is that of a few chunks, and its numbers are
those of the wrapped optimizer, to the last bit.

To torch it is the wrapped optimizer: `param_groups` are the same, so schedulers, hooks, closures,
`zero_grad`, `add_param_group` and state dicts work as usual; a state dict is of the same form, so
state goes from one to the other. Idea: ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.streams import Streams, streams_for
from shardwise.engine.tensor.shard_tensor import ShardTensor, settle, written
from shardwise.errors import OffloadError
from shardwise.offload.bare_step import BareStep, FirstState, set_gradient
from shardwise.offload.behind import Behind
from shardwise.offload.chunks import MASTER, Chunk, Entry, Piece, Slot, batches
from shardwise.offload.files import Calls, WorkingFile, aligned
from shardwise.offload.kept import (
    Kept,
    StateView,
    copied,
    gradient_of,
    local_part_of,
    name_of,
)
from shardwise.offload.kernel import Kernel
from shardwise.offload.stores import FileStore, MemoryStore, Store

Place = Literal["none", "cpu", "nvme"]
CHUNK_BYTES = 16 * 2**20
# In its first step the optimizer allocates state, which is copied to its place: of so many elements
# at a time, since the allocator keeps what large blocks leave.
FIRST_NUMEL = 2**16
_HALVES = (torch.bfloat16, torch.float16)
_HOOKS = [
    f"_optimizer_{what}_{when}_hooks"
    for what in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
_NO_STATE = ("params", "param_names", "lr", "initial_lr", "weight_decay")


class OffloadedOptimizer(Optimizer):
    """See the module docstring.

    Args:
        optimizer: an element-wise one; it is not to be stepped by itself any more. State that it
            has goes along.
        state: where the state lies: `none` (where the parameters are), `cpu` (host memory, pinned
            where there is an accelerator) or `nvme` (a file of each rank in `directory`).
        directory: on a local disk; made if it is not there.
        step_on: where the kernel runs: the parameters' `device`, or the `cpu`.
        master_weights: beside parameters in 16 bits, weights in float32 are part of the state; they
            are what is stepped, and the parameters are these, rounded.
        chunk_bytes: the most state that is brought at once.
        read_ahead, write_behind: chunks in memory beside the one that is stepped, for `nvme`.
        first_state: gives a parameter its state before its first step, instead of the optimizer.
        in_background: a step runs in a thread beside what comes next: `step()` returns at once,
            and the next forward waits for a unit's step when it gathers the unit; with
            `step_in_backward` units step while the backward runs. Whoever reads a parameter, the
            state or a gradient before waits for it. See `behind`.
        calls: what is asked of the operating system, for tests.

    Raises:
        ValueError: the optimizer's step is not element-wise, or places do not go together.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        state: Place,
        directory: Path | str | None = None,
        step_on: Literal["device", "cpu"] = "device",
        master_weights: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        read_ahead: int = 2,
        write_behind: int = 2,
        first_state: FirstState | None = None,
        in_background: bool = False,
        calls: Calls | None = None,
    ) -> None:
        _check(state, directory, step_on, chunk_bytes, read_ahead, write_behind)
        self.optimizer, self.place = optimizer, state
        self._kernel = Kernel(optimizer, first_state)
        self._directory = Path(directory) if directory is not None else None
        self._step_on, self._has_masters = step_on, master_weights
        self._chunk_bytes, self._calls = chunk_bytes, calls
        self._bounds = (read_ahead, write_behind)
        self._kept: Kept | None = None
        self._behind = Behind(self) if in_background else None
        self._checked: dict[int, str] = {}  # options of groups, for which slots were asked
        self._failure, self._is_closed = "", False
        self._loading: dict[int, Tensor] = {}  # master weights of a state dict
        self._coming: dict[Tensor, Any] = dict(optimizer.state)  # until there is room for it
        optimizer.state = defaultdict(dict)
        shared = {"defaults": optimizer.defaults, "param_groups": optimizer.param_groups}
        super().__setstate__({**shared, "state": StateView(self._laid_out)})
        for name in _HOOKS:  # those that were registered get this optimizer from now on
            setattr(self, name, getattr(optimizer, name))

    def __repr__(self) -> str:
        return f"OffloadedOptimizer(state={self.place!r}, {self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OffloadedOptimizer cannot be pickled; its state_dict() can")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    # -- stepping --------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        settle([p.grad for p in held])
        gradients = {p: gradient_of(p) for p in held}
        if self._behind is None:
            self._run(self._part(gradients))
        else:
            self._behind.step(gradients)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    @torch.no_grad()
    def step_part(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Step these parameters, and no others, with these gradients in place of `.grad`.

        Args:
            gradients: for each parameter this rank's part of the reduced gradient, a plain tensor
                of as many elements, complete, in host memory or on the device.
        """
        self._run(self._part({p: g.detach().reshape(-1) for p, g in gradients.items()}))

    @torch.no_grad()
    def step_later(self, parameters: Sequence[Tensor], ready: Any) -> bool:
        """Step these, of one unit, in the background; False where that is off. `ready`: an event
        of the device behind which their `.grad` is complete; it may be cleared at once.
        """
        if self._behind is None:
            return False
        if parameters:
            self._behind.submit({p: gradient_of(p) for p in parameters}, ready)
        return True

    def _part(self, gradients: dict[Tensor, Tensor]) -> Part:
        """What is to be stepped, as options and state are now; ValueError where it cannot be."""
        if self._behind is not None:
            self._behind.finish(gradients)
        kept, groups = self._with_entries(gradients), self._groups()
        for parameter, gradient in gradients.items():
            self._check_fits(kept.entries[parameter], gradient)
        self._check_options(kept, gradients, groups)
        chunks = kept.chunks_of(gradients)
        visits = [(c, any(p.entry.has_state for p in c.pieces)) for c in chunks]
        kernel: BareStep = self._kernel
        if self._behind is not None:
            kernel = kernel.as_it_is()
        return Part(gradients, groups, kept, kernel, visits)

    def _run(self, part: Part) -> None:
        gradients, kept, num_stepped = part.gradients, part.kept, 0
        scalars: dict[Tensor, dict[str, Any]] = {}
        try:
            for (chunk, _), memory in zip(part.visits, kept.store.stream(part.visits), strict=True):
                self._step_chunk(part, chunk, memory, scalars)
                num_stepped += 1
        except BaseException as error:
            if num_stepped or isinstance(error, OffloadError):
                self._failure = str(error) or type(error).__name__
            raise
        finally:
            for parameter in gradients:
                if isinstance(parameter, ShardTensor):
                    written(parameter)
        for parameter in gradients:
            entry = kept.entries[parameter]
            entry.scalars = scalars[parameter]
            entry.has_state, entry.lacks_master = bool(entry.slots or entry.scalars), False

    def _step_chunk(
        self, part: Part, chunk: Chunk, memory: Tensor, scalars: dict[Tensor, dict[str, Any]]
    ) -> None:
        bench = Bench(self._streams(chunk), self._computes_on(chunk), memory)
        held = [p for p in chunk.pieces if p.entry.parameter in part.gradients]
        new = [p for p in held if not p.entry.has_state]
        known = [p for p in held if p.entry.has_state]
        for pieces in (*([known] if known else []), *batches(new, FIRST_NUMEL)):
            self._step_pieces(part, chunk, pieces, bench, scalars)
        bench.give_back()

    def _step_pieces(
        self,
        part: Part,
        chunk: Chunk,
        pieces: list[Piece],
        bench: Bench,
        scalars: dict[Tensor, dict[str, Any]],
    ) -> None:
        params: list[list[Tensor]] = [[] for _ in part.kernel.groups]
        state: dict[Tensor, dict[str, Any]] = {}
        stepped: list[tuple[Piece, Tensor, dict[str, Tensor], Tensor | None]] = []
        for piece in pieces:
            entry, gradient = piece.entry, part.gradients[piece.entry.parameter]
            slots = chunk.views(bench.memory, piece)
            shard, param = bench.taken(_span(entry.parameter, piece))
            master = slots.pop(MASTER, None)
            if master is not None:
                _refresh(master, param, is_new=not entry.has_state or entry.lacks_master)
            target = param if master is None else master
            piece_of_it = bench.copy_of(gradient[piece.start : piece.stop])
            set_gradient(target, piece_of_it if master is None else piece_of_it.to(master.dtype))
            if entry.has_state:
                state[target] = {**{k: copied(v) for k, v in entry.scalars.items()}, **slots}
            params[part.groups[entry.parameter]].append(target)
            stepped.append((piece, target, slots, shard))
        after = part.kernel.run(params, state)
        for piece, target, slots, shard in stepped:
            made = after[target]
            _keep(made, slots)
            rest = {k: v for k, v in made.items() if k not in slots}
            scalars.setdefault(piece.entry.parameter, rest)
            if shard is not None or target.dtype != piece.entry.parameter.dtype:
                place = _span(piece.entry.parameter, piece)
                place.copy_(bench.streams.to_device(target.to(place.dtype), place.device))

    def prefetch(self, parameters: Iterable[Tensor]) -> None:
        """Begin to read the state of these parameters, which are stepped next: at most
        `read_ahead` chunks. What is read is used by whichever step comes to it. Steps in the
        background read by themselves."""
        if self._behind is not None:
            return
        kept = self._laid_out({})
        known = {p: None for p in parameters if p in kept.entries}
        chunks = kept.chunks_of(known)
        kept.store.prefetch(c for c in chunks if any(p.entry.has_state for p in c.pieces))

    # -- laying out ------------------------------------------------------------------------------
    def reserve(self) -> None:
        """Make room for the state of all trainable parameters: what cannot be shows now, and not
        in the first step."""
        self._laid_out()

    def _laid_out(self, gradients: Mapping[Tensor, Tensor] | None = None) -> Kept:
        """What is kept, with entries for all parameters of the groups, or for these; no step is
        under way."""
        if self._behind is not None:
            self._behind.finish_all()
        return self._with_entries(gradients)

    def _with_entries(self, gradients: Mapping[Tensor, Tensor] | None) -> Kept:
        self.raise_failure()
        groups = self._groups()
        wanted = [p for p in groups if p.requires_grad] if gradients is None else list(gradients)
        if strangers := [p for p in wanted if p not in groups]:
            raise ValueError(f"{name_of(strangers[0])}: is in no parameter group of the optimizer")
        known = self._kept.entries if self._kept is not None else {}
        new = [p for p in wanted if p not in known]
        if self._kept is None:
            self._kept = Kept(self._open(wanted), self._chunk_bytes)
        if new:
            if self._behind is not None:
                self._behind.finish_all()
            asked: dict[Any, tuple[Slot, ...]] = {}
            made = [self._entry(p, groups[p], (gradients or {}).get(p), asked) for p in new]
            self._kept.add(made)
        if self._coming:
            coming, self._coming = self._coming, {}
            self._laid_out({p: p for p in coming})
            self._kept.put(coming)
        return self._kept

    def note_failure(self, error: BaseException) -> None:
        """A step has failed in the background: some units are stepped, others are not."""
        self._failure = self._failure or str(error) or type(error).__name__

    def raise_failure(self) -> None:
        if self._is_closed:
            raise OffloadError("the optimizer was closed; make another one")
        if self._failure:
            raise OffloadError(
                f"the optimizer's state is not whole since a step has failed ({self._failure}); "
                "load the last checkpoint"
            )

    def _entry(
        self, parameter: Tensor, group: int, gradient: Tensor | None, asked: dict[Any, Any]
    ) -> Entry:
        local, name = local_part_of(parameter), name_of(parameter)
        if type(local) is not Tensor or not local.is_contiguous():
            raise ValueError(
                f"{name}: its state cannot be kept in pieces, since its shard is "
                f"{'not contiguous' if type(local) is Tensor else f'a {type(local).__name__}'}; "
                "leave it to another optimizer"
            )
        dtype = gradient.dtype if gradient is not None else parameter.grad_dtype or local.dtype
        is_mastered = self._has_masters and local.dtype in _HALVES
        key = group, local.dtype, dtype
        if key not in asked:
            like = torch.empty(0, dtype=local.dtype, device=self._kernel_device(local))
            like, dtype = (like.float(), torch.float32) if is_mastered else (like, dtype)
            asked[key] = self._kernel.slots(group, like, dtype)
        master = (Slot(MASTER, torch.float32),) if is_mastered else ()
        unit = getattr(parameter, "_mark", None)
        return Entry(parameter, name, local.numel(), asked[key] + master, unit)

    def _open(self, parameters: Sequence[Tensor]) -> Store:
        device = local_part_of(parameters[0]).device if parameters else torch.device("cpu")
        streams = streams_for(device)
        pinned = device.type != "cpu"

        def on_host(size_bytes: int) -> Tensor:
            return streams.on_host(aligned(size_bytes), pinned=pinned)

        if self.place == "nvme":
            assert self._directory is not None
            rank = dist.get_rank() if dist.is_initialized() else 0
            file = WorkingFile(self._directory / f"rank_{rank:05d}.state", self._calls)
            store: Store = FileStore(file, *self._bounds, on_host)
        elif self.place == "cpu":
            store = MemoryStore(on_host)
        else:
            store = MemoryStore(lambda n: torch.empty(n, dtype=torch.uint8, device=device))
        weakref.finalize(self, store.close)
        return store

    def _groups(self) -> dict[Tensor, int]:
        return {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}

    def _check_fits(self, entry: Entry, gradient: Tensor) -> None:
        found = local_part_of(entry.parameter).numel()
        if found != entry.numel or gradient.numel() != entry.numel:
            raise ValueError(
                f"{entry.name}: has {entry.numel:,} elements of state on this rank, but {found:,} "
                f"of the parameter and {gradient.numel():,} of the gradient; build the optimizer "
                "after the model is sharded"
            )

    def _check_options(
        self, kept: Kept, gradients: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int]
    ) -> None:
        """An option may have changed since, to one that keeps more."""
        options = [
            str([(k, v) for k, v in group.items() if k not in _NO_STATE])
            for group in self.param_groups
        ]
        firsts = {groups[p]: p for p in gradients}
        for group, parameter in firsts.items():
            if self._checked.get(group) == options[group]:
                continue
            entry = kept.entries[parameter]
            now = self._entry(parameter, group, gradients[parameter], {})
            if added := [s.name for s in now.slots if s not in entry.slots]:
                raise ValueError(
                    f"parameter group {group}: an option was changed and the optimizer keeps "
                    f"{added[0]!r} now, for which there is no room; set it when it is built"
                )
            self._checked[group] = options[group]

    # -- where -----------------------------------------------------------------------------------
    def _kernel_device(self, local: Tensor) -> torch.device:
        return torch.device("cpu") if self._step_on == "cpu" else local.device

    def _computes_on(self, chunk: Chunk) -> torch.device:
        return self._kernel_device(local_part_of(chunk.pieces[0].entry.parameter))

    def _streams(self, chunk: Chunk) -> Streams:
        return streams_for(local_part_of(chunk.pieces[0].entry.parameter).device)

    # -- state dicts -----------------------------------------------------------------------------
    def slots_of(self, parameter: Tensor) -> list[str]:
        """Names of what is kept for each element of a parameter."""
        return [
            slot.name for slot in self._laid_out({parameter: parameter}).entries[parameter].slots
        ]

    def stored_state(self, parameter: Tensor) -> dict[str, Any]:
        """As `state[parameter]`, with a `StoredSlot` for each slot; empty where there is none."""
        kept = self._laid_out({})
        entry = kept.entries.get(parameter)
        return kept.stored(entry) if entry is not None and entry.has_state else {}

    def put_state(self, values: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """State for these parameters, and none for all others; slots may be a `SlotSource`. A step
        that has failed is forgotten."""
        if self._is_closed:
            raise OffloadError("the optimizer was closed; make another one")
        if self._behind is not None:
            self._behind.end_all()
        self._failure, self._coming = "", {}
        if self._kept is not None:
            self._kept.store.reset()
        kept = self._laid_out()
        self._laid_out(dict.fromkeys(values))  # type: ignore[arg-type]
        for entry in kept.entries.values():
            entry.has_state = False
        try:
            kept.put(values)
        except OffloadError as error:
            self._failure = str(error)
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As torch's; master weights keep their dtype."""
        masters = {
            number: slots[MASTER]
            for number, slots in state_dict["state"].items()
            if isinstance(slots, Mapping) and MASTER in slots
        }
        without = {
            number: {k: v for k, v in slots.items() if k != MASTER} if number in masters else slots
            for number, slots in state_dict["state"].items()
        }
        self._loading = masters
        try:
            super().load_state_dict({**state_dict, "state": without})
        finally:
            self._loading = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch's `load_state_dict` ends with: the values go where they are kept."""
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update(loaded, params=params)
        numbered = [p for group in self.param_groups for p in group["params"]]
        values = {p: dict(slots) for p, slots in state["state"].items()}
        for number, master in self._loading.items():
            values[numbered[number]][MASTER] = master
        self.put_state(values)

    # -- ending ----------------------------------------------------------------------------------
    def flush(self) -> None:
        """Wait for steps and writes that are under way, and raise what went wrong in them."""
        if self._behind is not None:
            self._behind.finish_all()
        self.raise_failure()
        if self._kept is not None:
            try:
                self._kept.store.flush()
            except OffloadError as error:
                self._failure = str(error)
                raise

    def close(self) -> None:
        """Give memory and files back; the state is gone. What went wrong in a step in the
        background is raised then."""
        error = self._behind.close() if self._behind is not None else None
        if self._kept is not None:
            self._kept.store.close()
        self._is_closed = True
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class Part:
    """What one call steps: gradients (this rank's parts, flat) by parameter, the number of each
    parameter's group, where state lies, the arithmetic, and the chunks that are visited.
    """

    gradients: dict[Tensor, Tensor]
    groups: dict[Tensor, int]
    kept: Kept
    kernel: BareStep
    visits: list[tuple[Chunk, bool]]


class Bench:
    """Where one chunk is stepped: in place, or in copies on the device that computes."""

    def __init__(self, streams: Streams, device: torch.device, memory: Tensor) -> None:
        self.streams, self._device, self._home = streams, device, memory
        self.memory = self.copy_of(memory)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """On the device that computes; itself where it is there."""
        if tensor.device == self._device:
            return tensor
        if self._device.type != "cpu":
            return self.streams.to_device(tensor, self._device)
        host = self.streams.to_host(tensor, pinned=True)
        self.streams.land()
        return host

    def taken(self, shard: Tensor) -> tuple[Tensor | None, Tensor]:
        """A part of a parameter where it is computed with; the part itself if that is a copy."""
        param = self.copy_of(shard)
        return (None if param is shard else shard), param

    def give_back(self) -> None:
        """What has become of the chunk goes where it came from."""
        if self.memory is self._home:
            return
        if self._home.device.type == "cpu":
            host = self.streams.to_host(self.memory, pinned=True)
            self.streams.land()
            self._home.copy_(host)
        else:
            self._home.copy_(self.streams.to_device(self.memory, self._home.device))


def _check(
    state: str,
    directory: Path | str | None,
    step_on: str,
    chunk_bytes: int,
    read_ahead: int,
    write_behind: int,
) -> None:
    if state not in get_args(Place):
        raise ValueError(f"state: expected one of {', '.join(get_args(Place))}, found {state!r}")
    if (state == "nvme") != (directory is not None):
        has = "needs a directory on a local disk" if state == "nvme" else "takes no directory"
        raise ValueError(f"state={state!r} {has}")
    if step_on not in ("device", "cpu"):
        raise ValueError(f"step_on: expected device or cpu, found {step_on!r}")
    if state == "none" and step_on == "cpu":
        raise ValueError(
            "state='none' with step_on='cpu' would bring the state from the device and back in "
            "every step; keep it in host memory (state='cpu'), or step on the device"
        )
    if chunk_bytes < 2**16:
        raise ValueError(f"chunk_bytes: at least 65,536, found {chunk_bytes:,}")
    if read_ahead < 0 or write_behind < 1:
        raise ValueError(
            f"read_ahead at least 0 and write_behind at least 1, found {read_ahead} and "
            f"{write_behind}"
        )


def _span(parameter: Tensor, piece: Piece) -> Tensor:
    return local_part_of(parameter).view(-1)[piece.start : piece.stop]


def _refresh(master: Tensor, param: Tensor, *, is_new: bool) -> None:
    """Master weights that do not round to the parameter were left behind: somebody wrote to it."""
    if is_new:
        master.copy_(param)
    else:
        torch.where(master.to(param.dtype) == param, master, param.float(), out=master)


def _keep(made: Mapping[str, Any], slots: Mapping[str, Tensor]) -> None:
    """What the kernel has made anew goes to its place; the rest is there already."""
    for name, place in slots.items():
        value = made.get(name)
        if value is None:
            place.zero_()
        elif value.data_ptr() != place.data_ptr():
            place.copy_(value)
