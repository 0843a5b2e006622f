"""What the coordinator holds: theta in float32, and its optimizer. On disk after each round.

    theta -= lr * (d + mu * v)        d: mean of (theta - weights) over replicas
    v      = mu * v + d               torch.optim.SGD with Nesterov momentum

A checkpoint like those of a job (`round_dir/step_<round>`): whole or absent, with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
_KEPT = 2


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """lr, momentum: of the outer step; DiLoCo's are 0.7 and 0.9."""

    lr: float = 0.7
    momentum: float = 0.9


class Outer:
    """theta and momentum, by name of the parameter. `number`: rounds that are over."""

    def __init__(self, shapes: Shapes, settings: OuterSettings, directory: Path) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._holder = nn.Module()
        for name, shape in self.shapes.items():
            self._holder.register_parameter(_key(name), nn.Parameter(torch.zeros(shape)))
        self._sgd = torch.optim.SGD(
            self._holder.parameters(),
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
        )
        self._manager = CheckpointManager(directory, Ranks(), keep=_KEPT)
        self.number = 0
        self.theta: dict[str, Tensor] | None = None  # of this round; never written again
        self._resume()

    def _resume(self) -> None:
        found, _ = self._manager.latest()
        if found is None:
            return
        self._manager.load(found, self._holder, self._sgd, options=False)
        self.number = found.step
        self._show()

    def _show(self) -> None:
        params = self._holder.named_parameters()
        self.theta = {_name(key): param.detach().clone() for key, param in params}

    def begin(self, theta: Mapping[str, Tensor]) -> None:
        """The first weights, which a replica brought."""
        with torch.no_grad():
            for key, param in self._holder.named_parameters():
                param.copy_(theta[_name(key)])
        self._save()
        self._show()

    def step(self, differences: Sequence[Mapping[str, Tensor]]) -> None:
        """One outer step along the mean of what replicas sent; on disk before it is shown."""
        for key, param in self._holder.named_parameters():
            total = differences[0][_name(key)].clone()
            for other in differences[1:]:
                total += other[_name(key)]
            param.grad = total / len(differences)
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)
        self.number += 1
        self._save()
        self._show()

    def _save(self) -> None:
        self._manager.save(self.number, self._holder, self._sgd)

    def check(self, shapes: Shapes) -> None:
        """ConfigError where a replica trains other parameters."""
        other = {name: tuple(shape) for name, shape in shapes.items()}
        for name in [*self.shapes, *other]:
            mine, theirs = self.shapes.get(name), other.get(name)
            if mine != theirs:
                found = "is not trained" if theirs is None else f"has shape {list(theirs)}"
                wanted = "is not there" if mine is None else f"has {list(mine)}"
                raise ConfigError(
                    f"model: {name} {found} here, and {wanted} in what the replicas train; use "
                    "their model, or another coordinator"
                )


def check_boxes(boxes: Sequence[tuple[str, Box]], shapes: Shapes) -> None:
    """ConfigError where a rank's parts do not lie in the parameters."""
    for name, box in boxes:
        shape = shapes.get(name)
        fits = shape is not None and len(box.start) == len(box.size) == len(shape)
        if not fits or not all(
            min(start, size) >= 0 and start + size <= whole
            for start, size, whole in zip(box.start, box.size, shape or (), strict=True)
        ):
            raise ConfigError(f"model: a part {box} of {name} is not in its shape {shape}")


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """A view."""
    slices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return tensor[slices]


def _key(name: str) -> str:
    return "p:" + name.replace(".", "/")


def _name(key: str) -> str:
    return key.removeprefix("p:").replace("/", ".")
