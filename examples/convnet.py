"""A small ConvNet with BatchNorm on pictures that it draws itself: your own model and data in one
job.

    shardwise train examples/convnet.toml

`build` and `datasets` are the two functions that the configuration names. The model returns its own
loss and one more number to log; the datasets are ordinary map-style ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE = 16
SHAPES = ("disc", "square", "cross", "ring")


class Shapes(Dataset[dict[str, Tensor]]):
    """Grey pictures of one of four shapes, anywhere, in noise. Sample i is the same on every
    machine."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self._first + index)
        label = int(torch.randint(len(SHAPES), (1,), generator=generator))
        center = 5 + 6 * torch.rand(2, generator=generator)
        radius = 2.5 + 2 * torch.rand(1, generator=generator)
        grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
        dy, dx = (grid - center[:, None, None]).abs()
        distance = torch.sqrt(dy**2 + dx**2)
        inside = {
            "disc": distance < radius,
            "square": torch.maximum(dy, dx) < radius,
            "cross": (torch.minimum(dy, dx) < 1) & (torch.maximum(dy, dx) < radius),
            "ring": (distance < radius) & (distance > radius - 1.5),
        }[SHAPES[label]]
        picture = inside.float() + 0.4 * torch.randn(SIZE, SIZE, generator=generator)
        return {"picture": picture[None], "label": torch.tensor(label)}


class ConvNet(nn.Module):
    """Three convolutions with batch normalization; `forward` returns the loss and the accuracy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = [1, width, 2 * width, 4 * width]
        stages = [
            nn.Sequential(
                nn.Conv2d(channels[i], channels[i + 1], 3, padding=1, bias=False),
                nn.BatchNorm2d(channels[i + 1]),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            for i in range(3)
        ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(4 * width * (SIZE // 8) ** 2, len(SHAPES))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.head(self.stages(batch["picture"]).flatten(1))
        label = batch["label"]
        loss = F.cross_entropy(logits.float(), label)
        return {"loss": loss, "accuracy": (logits.argmax(1) == label).float().mean()}


def build(options: dict[str, Any]) -> nn.Module:
    """`model.kind`: the other keys of [model] arrive in `options`."""
    return ConvNet(width=options.get("width", 16))


def datasets(options: dict[str, Any]) -> tuple[Shapes, Shapes]:
    """`data.source`: a training part and a held-out part that share no sample."""
    return Shapes(0, 4096), Shapes(1_000_000, 512)
