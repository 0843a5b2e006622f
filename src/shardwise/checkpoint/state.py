"""The state of models, optimizers and the process, as one flat set of named tensors and values.

    model.<name>                 parameters and persistent buffers, by their canonical names
    optim.<parameter>.<slot>     what an optimizer keeps for a parameter, by the parameter's name
    rng.<rank>.<kind>            random state
    objects: optim.groups        parameter groups: names of their parameters, options
             scheduler, extra    what the caller gives
             about, beside       the model's class and size; its configuration (see `beside`)

Several optimizers may share the parameters of a model among them. What an offloaded optimizer keeps
is not brought together for a checkpoint: `pieces` gives it piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import quantized
from shardwise.checkpoint.beside import BESIDE, files_of_model, unsharded_class
from shardwise.checkpoint.names import (
    GROUPS,
    MODEL,
    OPTIM,
    parameter_names,
    submodule,
    tensor_names,
)
from shardwise.checkpoint.rng import capture_rng
from shardwise.errors import CheckpointError
from shardwise.offload import OffloadedOptimizer, StoredSlot

RNG, SCHEDULER, EXTRA, ABOUT = "rng.", "scheduler", "extra", "about"
Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(slots=True)
class State:
    """Tensors by key (sharded or plain), other names of the same tensors, values.

    A tensor that has `pieces` is on the meta device and says how it is laid out; its content on
    this rank comes from them, flat, in host memory, each valid until the next.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, Callable[[], Iterator[Tensor]]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    is_stage: bool = False  # other ranks hold other names, see `stages`

    @classmethod
    def of_run(
        cls,
        rank: int,
        model: nn.Module,
        optimizers: Optimizers,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> State:
        """All that a run needs to go on: what this rank holds of it, its random state included."""
        state = cls()
        state.add_model(model)
        state.add_optimizers(model, optimizers)
        inner = submodule(model, "")
        num_params = sum(p.numel() for p in inner.parameters())
        state.objects[ABOUT] = {"model": unsharded_class(inner).__name__, "num_params": num_params}
        if files := files_of_model(model):
            state.objects[BESIDE] = files
        for kind, value in capture_rng().items():
            state.tensors[f"{RNG}{rank}.{kind}"] = value
        if scheduler is not None:
            state.objects[SCHEDULER] = scheduler.state_dict()
        state.objects[EXTRA] = extra or {}
        return state

    def add_model(self, model: nn.Module) -> None:
        seen: dict[int, str] = {}
        names = tensor_names(model)
        # A model whose base stands elsewhere says by name what of it is to be kept.
        wanted: Any = getattr(submodule(model, ""), "saved_names", None)
        # keep_vars: the tensors themselves, so that one under two names is seen to be one.
        for name, value in model.state_dict(keep_vars=True).items():
            key = MODEL + names[name]
            if wanted is not None and names[name] not in wanted:
                continue
            if not isinstance(value, Tensor):  # get_extra_state()
                self.objects[key] = value
            elif id(value) in seen:
                self.ties[key] = seen[id(value)]
            else:
                seen[id(value)] = key
                self.tensors[key] = value

    def add_optimizers(self, model: nn.Module, optimizers: Optimizers) -> None:
        names = parameter_names(model)
        groups: list[dict[str, Any]] = []
        for optimizer in as_list(optimizers):
            slots_of = optimizer.state.get
            if isinstance(optimizer, OffloadedOptimizer):
                optimizer.flush()
                slots_of = optimizer.stored_state
            for position, group in enumerate(optimizer.param_groups):
                owned = [_named(p, names, optimizer, position) for p in group["params"]]
                options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                groups.append({"params": owned, "options": options})
                for name, parameter in zip(owned, group["params"], strict=True):
                    self._add_slots(name, slots_of(parameter) or {})
        if groups:
            self.objects[GROUPS] = groups

    def _add_slots(self, name: str, slots: dict[str, Any]) -> None:
        for slot, value in slots.items():
            if not isinstance(slot, str) or "." in slot:
                raise CheckpointError(
                    f"{name}: optimizer state {slot!r} cannot be saved; names are strings without "
                    "dots"
                )
            key = f"{OPTIM}{name}.{slot}"
            if isinstance(value, StoredSlot):
                self.tensors[key], self.pieces[key] = value.like, value.pieces
            elif quantized.is_quantized(value):
                self.tensors |= quantized.parts_of(key, value)
            elif isinstance(value, Tensor):
                if not quantized.is_empty_part(value):
                    self.tensors[key] = value
            else:
                self.objects[key] = value


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    if optimizers is None:
        return []
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    # One that holds several stands for these.
    return [own for one in listed for own in getattr(one, "optimizers", (one,))]


def _named(parameter: Tensor, names: dict[int, str], optimizer: Optimizer, position: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CheckpointError(
            f"{type(optimizer).__name__}: parameter group {position} holds a tensor of shape "
            f"{tuple(parameter.shape)} that is no parameter of the model; make the optimizer from "
            "model.parameters() after sharding"
        )
    return name
