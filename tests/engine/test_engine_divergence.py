"""Ranks that run different units on c10d: a named error before anything is paired wrongly."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import grid, line

import shardwise as sw
from ranks import announce, on_ranks, spawn_ranks
from shardwise.errors import DivergenceError, PeerTimeoutError, TransportError


class Choosy(nn.Module):
    """Layers of very different sizes, of which a call runs some."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = (7, 300, 41, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, n), nn.Linear(n, width)) for n in sizes
        )

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        for i in use:
            x = x + self.layers[i](x)
        return x


def sharded(mesh: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Choosy()
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh, transport="c10d", **options)
    return sw.fully_shard(model, mesh=mesh, transport="c10d", **options)


def train(model: Any, use: tuple[int, ...]) -> None:
    model(torch.ones(2, 4), use).sum().backward()


def refused(model: Any, use: tuple[int, ...], match: str) -> None:
    began = time.monotonic()
    with pytest.raises((DivergenceError, PeerTimeoutError), match=match):
        train(model, use)
    assert time.monotonic() - began < 30, "10 s on a machine that is not busy"


def end() -> None:
    dist.destroy_process_group()  # it may hold a gather without a partner


@pytest.mark.parametrize("warm", [0, 2])
@on_ranks(2, 3)
def test_sizes_that_differ_do_not_meet(warm: int, rank: int, world: int) -> None:
    """In the first step and after a few equal ones; other sizes, that would end the process."""
    model = sharded(line(world))
    for _ in range(warm):
        train(model, (0, 2))
    refused(model, (0, 1) if rank == world - 1 else (0, 2), r"layers\.(1|2)")
    end()


@on_ranks(2)
def test_the_error_names_both(rank: int, world: int) -> None:
    model = sharded(line(world))
    train(model, (0, 2, 3))
    own, other = ("2", "1")[rank], ("1", "2")[rank]
    with pytest.raises((DivergenceError, PeerTimeoutError)) as caught:
        train(model, (0, int(own), 3))
    text = str(caught.value)
    assert f"layers.{own}" in text and f"layers.{other}" in text, text
    assert f"rank {1 - rank}" in text
    assert "make every rank run every unit" in text
    end()


@on_ranks(2)
def test_more_and_fewer_units(rank: int, world: int) -> None:
    model = sharded(line(world))
    train(model, (0, 1, 2, 3))
    refused(model, (0, 1, 2, 3) if rank else (0, 1), "rank")
    end()


@on_ranks(2)
def test_a_model_that_one_rank_calls(rank: int, world: int) -> None:
    """Both have run before: a phase that does not follow as it did is asked about too."""
    first, second = sharded(line(world)), sharded(line(world))
    for _ in range(2):
        train(first, (0, 1))
        train(second, (2, 3))
    if rank == 0:
        train_and_refuse = (second, (3, 2))
    else:
        train_and_refuse = (first, (0, 1))
    refused(*train_and_refuse, match="rank")
    end()


class Scales(nn.Module):
    """Two parameters of one size in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.first * self.second


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("warm", [0, 2])
@on_ranks(2)
def test_ranks_that_freeze_others(strategy: str, warm: int, rank: int, world: int) -> None:
    """Sums of one size, of different parameters: named, and right once the flags are equal."""
    model: Any = sw.fully_shard(Scales(), mesh=line(world), strategy=strategy, transport="c10d")
    x = torch.full((2, 8), rank + 1.0)
    for _ in range(warm):
        model(x).sum().backward()
        model.zero_grad()
    (model.first if rank else model.second).requires_grad_(False)
    with pytest.raises((DivergenceError, PeerTimeoutError), match=r"only \w+\).*requires_grad"):
        model(x).sum().backward()
    model.zero_grad()
    model.requires_grad_(True)
    model(x).sum().backward()
    for p in model.parameters():
        assert torch.equal(p.grad.full_tensor(), torch.full((8,), 3.0))


@on_ranks(2)
def test_equal_changes_are_no_divergence(rank: int, world: int) -> None:
    """All ranks take another branch, evaluate in between, skip a backward."""
    model = sharded(line(world))
    for use in ((0, 1), (0, 1), (1, 0), (2,), (0, 1, 2, 3), (0, 1), (0, 1)):
        train(model, use)
        with torch.no_grad():
            model(torch.ones(2, 4), use[:1])
        model(torch.ones(2, 4), use)


@on_ranks(2)
def test_nothing_is_asked_once_it_is_known(rank: int, world: int) -> None:
    """The third step neither reads nor writes the board but for the end of its phases."""
    from shardwise.comm.board import Board

    model = sharded(line(world))
    for _ in range(2):
        train(model, (0, 1, 2))
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        set_, find = Board.set, Board.find
        patch.setattr(Board, "set", lambda b, k, t: (asked.append("set"), set_(b, k, t)))
        patch.setattr(Board, "find", lambda b, k: (asked.append("find"), find(b, k))[1])
        train(model, (0, 1, 2))
    assert asked.count("set") == 2, asked


@on_ranks(4)
def test_hosts_that_differ_on_a_hybrid_mesh(rank: int, world: int) -> None:
    """Within a host all agree; between the hosts (the replicate axis) they do not."""
    model = sharded(grid(2, 2))
    for _ in range(2):
        train(model, (0, 1, 3))
    host = rank // 2
    began = time.monotonic()
    with pytest.raises((DivergenceError, PeerTimeoutError, TransportError)) as caught:
        for _ in range(3):
            train(model, (0, 2, 3) if host else (0, 1, 3))
    assert "rank" in str(caught.value) and time.monotonic() - began < 40
    end()


def wait_for_a_sleeper(rank: int, world: int, how: str, transport: str) -> str:
    """What a rank reads that waits for one that does not come."""
    logging.basicConfig(level=logging.WARNING)
    sw.set_wait_limit(6.0, warn_after=1.0)
    torch.manual_seed(0)
    model = Choosy()
    mesh = line(world) if how != "hybrid" else grid(2, world // 2)
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh, transport=transport)
    sw.fully_shard(model, mesh=mesh, transport=transport)
    for _ in range(2):
        train(model, (0, 1))
    announce("running")
    if rank == world - 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12.0)
    try:
        train(model, (0, 1))
    except (TransportError, DivergenceError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@pytest.mark.parametrize("how", ["sleeps", "hybrid", "stopped", "killed"])
def test_a_rank_that_does_not_come(how: str, transport: str) -> None:
    """All ranks get an error that says where each is; a sleeper gets it when it comes."""
    world = 4 if how == "hybrid" else 3
    with spawn_ranks(world, wait_for_a_sleeper, how, transport) as group:
        for rank in range(world):
            group.wait_for("running", rank=rank)
        outcomes = group.join(timeout_s=60, ranks=range(world - (how == "stopped")))
    texts = [o.value for o in outcomes if o.kind == "ok"]
    assert len(texts) == (world if how in ("sleeps", "hybrid") else world - 1), outcomes
    for text in texts[: world - 1]:
        assert "nothing" not in text.splitlines()[0], text
    if how != "killed":
        assert any("waits for" in t or "has waited" in t for t in texts), texts
        assert any(f"rank {world - 1}" in t for t in texts), texts
