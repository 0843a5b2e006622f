"""What an optimizer keeps of a tensor: names, shapes, dtypes. All ranks know it, one has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Form:
    """What the optimizer keeps of a piece, as all ranks know it."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    numbers: dict[str, torch.dtype | type] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: Mapping[str, Any]) -> Form:
        made = cls()
        for name, value in slots.items():
            if isinstance(value, Tensor) and value.ndim:
                made.tensors[name] = (tuple(value.shape), value.dtype)
            elif isinstance(value, Tensor):
                made.numbers[name] = value.dtype
            elif type(value) in (int, float, bool):
                made.numbers[name] = type(value)
            else:
                made.others[name] = value
        return made

    def pack(self, slots: Mapping[str, Any], device: torch.device) -> Tensor:
        """The numbers, in float64."""
        values = [float(slots[name]) for name in self.numbers]
        return torch.tensor(values, dtype=torch.float64, device=device)

    def unpack(self, packed: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.others)
        for (name, kind), value in zip(self.numbers.items(), packed.tolist(), strict=True):
            is_dtype = isinstance(kind, torch.dtype)
            found[name] = torch.tensor(value, dtype=kind) if is_dtype else kind(value)  # type: ignore[call-overload, operator]
        return found

    def joined(self, more: Form) -> Form:
        return Form(
            self.tensors | more.tensors, self.numbers | more.numbers, self.others | more.others
        )
