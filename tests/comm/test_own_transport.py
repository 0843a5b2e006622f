"""A transport of one's own, by name and as an object: it trains, and has what ours have: the order
check, wait limits and their texts, and a place in every list of names.
"""

from __future__ import annotations

import logging
import re
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from axes import alone, shard_axis
from squeezed import Squeezed, SqueezedBucket, open_squeezed

import shardwise as sw
from ranks import announce, on_ranks, spawn_ranks
from shardwise.bench.engines import parse_engine
from shardwise.cli.explain import main as explain
from shardwise.comm import choose
from shardwise.comm.choose import open_transport, register_transport
from shardwise.comm.transport import Axis
from shardwise.doctor.command import parser, plan_of
from shardwise.errors import DivergenceError, PeerTimeoutError, TransportError

CPU = torch.device("cpu")
MANY = (Axis("shard", (0, 1), 0, None), alone("replicate", 0))


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_ENTRIES", dict(choose._ENTRIES))


class Chain(nn.Module):
    """Layers of which a call runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for i in use:
            x = torch.tanh(self.layers[i](x))
        return x


def sharded(transport: Any) -> Any:
    torch.manual_seed(0)
    model = Chain()
    for layer in model.layers:
        sw.fully_shard(layer, transport=transport)
    return sw.fully_shard(model, transport=transport)


def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(20):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@on_ranks(2, 3)
def test_one_that_compresses_trains(rank: int, world: int) -> None:
    register_transport("squeezed", open_squeezed)
    torch.manual_seed(1)
    x, y = torch.randn(6, 6), torch.randn(6, 6).tanh()
    model = sharded("squeezed")
    ours = losses(model, x, y)
    torch.manual_seed(0)
    plain = losses(Chain(), x, y)
    # int8 keeps parameters to 1/254 of the largest of a shard: 0.4 / 254 = 0.0016 in each.
    assert ours == pytest.approx(plain, abs=0.01), (ours, plain)
    assert ours[-1] < 0.7 * ours[0] and ours != plain


@on_ranks(2)
def test_its_buckets_are_its_own(rank: int, world: int) -> None:
    own = Squeezed(shard_axis(rank, world), alone("replicate", rank))
    model = sharded(own)
    model(torch.ones(2, 6)).sum().backward()
    assert own.buckets and all(type(b) is SqueezedBucket and b.sent_bytes for b in own.buckets)
    numel = sum(p.numel() for p in model.parameters())
    assert sum(b.sent_bytes for b in own.buckets) < 4 * numel * world, "less than fp32 would send"
    axes = (shard_axis(rank, world), alone("replicate", rank))
    assert open_transport(own, *axes, CPU) is open_transport(own, *axes, CPU)


def own_or(name: str, rank: int, world: int) -> Any:
    if name != "squeezed":
        return name
    return Squeezed(shard_axis(rank, world), alone("replicate", rank))


def diverge(rank: int, world: int, name: str) -> str:
    model = sharded(own_or(name, rank, world))
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises((DivergenceError, PeerTimeoutError)) as caught:
        model(torch.ones(2, 6), (0, 1) if rank else (0, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("name", ["c10d", "squeezed"])
def test_ranks_that_diverge_are_told_as_on_c10d(name: str) -> None:
    with spawn_ranks(2, diverge, name) as group:
        texts = [outcome.value for outcome in group.join(60)]
    for text in texts:
        assert "layers.1" in text and "layers.2" in text, text
        assert "All ranks must run the same units in the same order" in text, text


def wait_for_one(rank: int, world: int, name: str) -> str:
    sw.set_wait_limit(4, warn_after=1)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    model = sharded(own_or(name, rank, world))
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    announce("running")
    if rank:
        time.sleep(8)
        return ""
    try:
        model(torch.ones(2, 6))
    except TransportError as error:
        assert records, "it is logged before it is an error"
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["c10d", "squeezed"])
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_on_c10d(name: str) -> None:
    with spawn_ranks(2, wait_for_one, name) as group:
        text = group.join(60)[0].value
    assert "has waited 4 s for gather of layers.0[0]" in text, text
    assert "rank 1: in user code" in text and "set_wait_limit" in text, text


def test_names_are_listed_everywhere(tmp_path: Any, capsys: Any) -> None:
    register_transport("squeezed", open_squeezed)
    with pytest.raises(ValueError, match="choose one of auto, c10d, shared_memory, fake, squeezed"):
        open_transport("x", *MANY, CPU)
    assert parse_engine("shardwise:squeezed:zero2").options == ("squeezed", "shard_grad_op")
    plan = plan_of(parser().parse_args(["--transports", "squeezed,c10d"]), tmp_path)
    assert plan.transports == ("squeezed", "c10d")
    assert (
        explain(["--shard.transport", "squeezed", "--shard.overrides", "blocks.0=:squeezed"]) == 0
    )
    assert "transport squeezed: as asked for" in capsys.readouterr().out
    assert explain(["--shard.transport", "squashed"]) == 2
    assert "did you mean 'squeezed'?" in capsys.readouterr().err


def test_one_that_cannot_serve_a_mesh_says_why() -> None:
    register_transport("picky", open_squeezed, lambda reach: f"{reach.shard.size} ranks are many")
    with pytest.raises(TransportError, match=r"'picky' cannot serve this mesh: 2 ranks are"):
        open_transport("picky", *MANY, CPU)
    with pytest.raises(ValueError, match="is one of shardwise's own"):
        register_transport("c10d", open_squeezed)


def test_an_installed_package_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("brought", "squeezed:open_squeezed", "shardwise.transports")
    monkeypatch.setattr(choose, "_brought", lambda: {"brought": point})
    assert "brought" in choose.names()
    assert open_transport("brought", *MANY, CPU).name == "squeezed"


# -- rules that the sources keep -------------------------------------------------------------------
def lines_of_src() -> list[tuple[str, str]]:
    root = Path(sw.__file__).parent
    files = sorted(root.rglob("*.py"))
    return [(str(f.relative_to(root)), line) for f in files for line in f.read_text().splitlines()]


def test_nothing_goes_by_the_name_of_a_transport() -> None:
    asked = re.compile(
        r"transport\.name (==|!=|in|not in)|hasattr\((\w+\.)*transport, \"|\.private\b"
        r"|isinstance\([^)]*(C10d|SharedMemory|Watched|Fake|Tree)Transport"
    )
    assert not [found for found in lines_of_src() if asked.search(found[1])]


def test_small_exchanges_go_through_one_module() -> None:
    raw = re.compile(r"dist\.(all_reduce|all_gather\w*|broadcast\w*|barrier|monitored_barrier)\(")
    found = [name for name, line in lines_of_src() if raw.search(line)]
    # Collectives of the data path; what a benchmark times; a text with an example.
    allowed = ("comm/exchange.py", "comm/c10d/", "bench/rank.py", "engine/guards/audit.py")
    allowed += ("doctor/machine/", "train/link.py")  # the latter: a link, once
    assert not [name for name in found if not name.startswith(allowed)]
