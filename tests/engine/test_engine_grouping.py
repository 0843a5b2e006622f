"""Which modules become units: by repeated blocks and bytes, by name, by size. No ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import line

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.grouping import choose_units
from shardwise.units import parse_size


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Decoder(nn.Module):
    """On meta: only sizes matter."""

    def __init__(self, width: int, depth: int, vocabulary: int, tied: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(depth: int) -> list[str]:
    return [f"blocks.{i}" for i in reversed(range(depth))]


def test_blocks_are_units() -> None:
    assert choose_units(Decoder(512, 3, 1000)) == [[n] for n in names(3)]


def test_small_neighbours_share_a_unit() -> None:
    """2.1 MB for four blocks of width 128 (525,824 bytes): three fit into 2 MiB."""
    assert choose_units(Decoder(128, 4, 100)) == [
        ["blocks.3"],
        ["blocks.0", "blocks.1", "blocks.2"],
    ]
    assert choose_units(Decoder(8, 4, 100)) == [[f"blocks.{i}" for i in range(4)]]


def test_large_leftovers_get_units() -> None:
    """A vocabulary that outweighs the largest block must not be gathered for the whole pass."""
    blocks = [[n] for n in names(3)]
    assert choose_units(Decoder(512, 3, 5000)) == [["head"], ["embed"], *blocks]
    assert choose_units(Decoder(512, 3, 5000, tied=True)) == [["embed"], *blocks]
    assert choose_units(Decoder(512, 3, 1500)) == blocks  # together lighter than a block


def test_by_name_and_size() -> None:
    model = Decoder(128, 2, 100)
    assert choose_units(model, ["Block"]) == [["blocks.1"], ["blocks.0"]]
    assert choose_units(model, "*.up") == [["blocks.1.up"], ["blocks.0.up"]]
    assert choose_units(model, "600 KB") == choose_units(model, 600_000)
    assert choose_units(model, 600_000) == [["head"], ["blocks.1"], ["blocks.0"], ["embed"]]
    with pytest.raises(ValueError, match="nothing in Decoder has the class or name 'Blocks'"):
        choose_units(model, ["Blocks"])
    wrong: Any = True
    with pytest.raises(ValueError, match="found True"):
        choose_units(model, wrong)
    assert (parse_size("32MiB"), parse_size("1.5 GB"), parse_size("blocks")) == (
        2**25,
        1_500_000_000,
        None,
    )


@on_ranks(2)
def test_a_shared_unit_trains(rank: int, world: int) -> None:
    """Blocks that share a unit are gathered once, and compute what they did."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(*(Block(8) for _ in range(3))), nn.Linear(8, 8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block(8) for _ in range(3))), nn.Linear(8, 8))
    sw.shard_model(model, mesh=line(world), transport="c10d", activation_checkpointing=True)
    assert [u.num_modules for u in units_in(model)] == [1, 3]
    x = torch.ones(2, 8) * (rank + 1)
    with sw.record_events(model) as log:
        model(x).square().sum().backward()
    assert log.text("AG").count("AG 0") == 2  # forward and backward
    (plain(torch.ones(2, 8)).square().sum() / 2).backward()
    (plain(2 * torch.ones(2, 8)).square().sum() / 2).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)


@on_ranks(2)
def test_one_unit_behind_itself(rank: int, world: int) -> None:
    """The output of one use is the input of the next: no release between them."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    for transport in ("c10d", "shared_memory"):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        sw.fully_shard(list(layers), mesh=line(world), transport=transport)
        for chain in ((0, 1), (0, 0), (0, 1, 0)):
            x = y = torch.ones(2, 8, requires_grad=True)
            for i in chain:
                x, y = layers[i](x), plain[i](y)
            x.square().sum().backward()
            y.square().sum().backward()
        for (name, p), q in zip(plain.named_parameters(), layers.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)
        plain.zero_grad()
