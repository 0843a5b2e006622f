"""Parameters that are added, renamed or removed after sharding: right, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import STRATEGIES, TRANSPORTS, Mlp, batch, line, local, loss_of, make, part
from torch.nn.utils import parametrize, prune, weight_norm

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import EngineError


class Adapted(nn.Module):
    """A layer with a low-rank path beside it."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, 8, generator=generator))
        self.up = nn.Parameter(torch.randn(8, 2, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def blocks(rank: int = 0) -> nn.Module:
    torch.manual_seed(0)
    model = Mlp()
    model.layers = nn.ModuleList(nn.Sequential(layer) for layer in model.layers)
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def adapt(model: nn.Module, rank: int = 0) -> None:
    """New sub-modules in the units' territory; the frozen base stays where it is."""
    for layer in model.layers:
        layer[0].requires_grad_(False)
        layer[0] = Adapted(layer[0], seed=rank)
    model.gain = nn.Parameter(torch.ones(8))


def train(model: nn.Module, start: int, steps: int = 2) -> None:
    """Each rank has the same data, so one plain process is the oracle."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(start, start + steps):
        gain = getattr(model, "gain", None)
        out = model(batch(Mlp, step, 0))
        (loss_of(out) + (0 if gain is None else 0 * out.sum())).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(model: nn.Module, plain: nn.Module) -> None:
    found = dict(model.named_parameters())
    assert set(found) == {n for n, _ in plain.named_parameters()}
    for name, q in plain.named_parameters():
        assert type(found[name]).__name__ == "ShardTensor", name
        assert torch.equal(local(found[name]), part(q.detach(), found[name])), name


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_adapters_join_their_units(rank: int, world: int, transport: str, when: str) -> None:
    for strategy in STRATEGIES:
        plain = blocks()
        model = shard(
            copy.deepcopy(plain), mesh=line(world), strategy=strategy, transport=transport
        )
        if when == "after":
            train(plain, 0)
            train(model, 0)
        adapt(plain)
        adapt(model, rank)  # other values on each rank: the first rank's win
        model(batch(Mlp, 0, 0))
        same(model, plain)
        train(plain, 2)
        train(model, 2)
        same(model, plain)
        assert set(model.state_dict()) == set(plain.state_dict())


@on_ranks(2)
def test_an_optimizer_built_before_the_forward_that_takes_them_in(rank: int, world: int) -> None:
    plain = blocks()
    model = shard(copy.deepcopy(plain), mesh=line(world))
    train(plain, 0)
    train(model, 0)
    adapt(plain)
    adapt(model)
    train(plain, 2)
    train(model, 2)  # its optimizer holds the plain adapters at first
    same(model, plain)


@on_ranks(2)
def test_adapters_added_in_an_accumulation(rank: int, world: int) -> None:
    plain, model = blocks(), shard(blocks(), mesh=line(world))
    with sw.no_sync(model):
        loss_of(model(batch(Mlp, 0, 0))).backward()
    loss_of(plain(batch(Mlp, 0, 0))).backward()
    for m in (plain, model):
        m.layers[0][0] = Adapted(m.layers[0][0], 0)
        loss_of(m(batch(Mlp, 1, 0))).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(local(p.grad), part(q.grad, p)), name


@on_ranks(2)
def test_a_graph_from_before_is_refused(rank: int, world: int) -> None:
    model = shard(blocks(), mesh=line(world))
    loss = loss_of(model(batch(Mlp, 0, 0)))
    adapt(model)
    model(batch(Mlp, 1, 0))
    with pytest.raises(RuntimeError, match=r"laid out anew|inplace operation|released"):
        loss.backward()


@on_ranks(2)
def test_a_parameter_added_by_the_forward_itself_is_refused(rank: int, world: int) -> None:
    class Lazy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "late"):
                self.late = nn.Parameter(torch.ones(8))
            return super().forward(x) * self.late

    model = sw.fully_shard(Lazy(8, 8), mesh=line(world))
    with pytest.raises(EngineError, match=r"late: was added to the sharded unit '\(root\)' while"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_a_new_parameter_that_has_a_gradient_is_refused(rank: int, world: int) -> None:
    model = shard(blocks(), mesh=line(world))
    model(batch(Mlp, 0, 0))
    model.layers[0].extra = nn.Parameter(torch.ones(8))
    model.layers[0].extra.sum().backward()
    with pytest.raises(EngineError, match=r"extra: was added to the sharded unit 'layers.0' and"):
        model(batch(Mlp, 0, 0))


@on_ranks(2)
def test_new_parameters_that_no_unit_owns_are_named(rank: int, world: int) -> None:
    model = Mlp()
    model.norm.requires_grad_(False)
    for layer in model.layers:
        sw.fully_shard(layer, mesh=line(world))
    model(batch(Mlp, 0, 0)).sum().backward()
    model.norm.bonus = nn.Parameter(torch.ones(8))
    around = nn.Sequential(model)
    for _ in range(2):  # a check that has raised is made again
        with pytest.raises(RuntimeError, match=r"no unit owns: norm\.bonus"):
            around(batch(Mlp, 0, 0))


@on_ranks(2)
def test_parametrizing_sharded_modules(rank: int, world: int) -> None:
    class Double(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return 2 * w

    plain = blocks()
    model = shard(copy.deepcopy(plain), mesh=line(world))
    train(plain, 0)
    train(model, 0)
    for m in (plain, model):
        parametrize.register_parametrization(m.layers[1][0], "weight", Double())
    assert list(model.state_dict()) == list(plain.state_dict())
    train(plain, 2)
    train(model, 2)
    same(model, plain)
    for m in (plain, model):
        parametrize.remove_parametrizations(m.layers[1][0], "weight", leave_parametrized=False)
    train(plain, 4)
    train(model, 4)
    same(model, plain)


@on_ranks(2)
def test_pruning_sharded_modules_is_refused(rank: int, world: int) -> None:
    """Needs indexing that DTensor refuses: the remedy is said, the model is as before."""
    plain = blocks()
    model = shard(copy.deepcopy(plain), mesh=line(world))
    train(plain, 0)
    train(model, 0)
    with pytest.raises(RuntimeError) as caught:
        prune.l1_unstructured(model.layers[1][0], "weight", amount=0.3)
    assert "before fully_shard" in "".join(caught.value.__notes__)
    with pytest.raises(EngineError, match="met a sharded parameter and a plain tensor"):
        prune.custom_from_mask(model.layers[0][0], "weight", torch.ones(8, 8))
    train(plain, 2)
    train(model, 2)
    same(model, plain)


@on_ranks(2)
def test_weight_norm_on_sharded_modules(rank: int, world: int) -> None:
    plain = blocks()
    model = shard(copy.deepcopy(plain), mesh=line(world))
    train(plain, 0)
    train(model, 0)
    for m in (plain, model):
        torch.nn.utils.parametrizations.weight_norm(m.layers[1][0], "weight")
        weight_norm(m.layers[2][0], "weight")
    train(plain, 2)
    train(model, 2)
    same(model, plain)


@on_ranks(2)
def test_parameters_that_are_removed_leave_their_unit(rank: int, world: int) -> None:
    plain = blocks()
    model = shard(copy.deepcopy(plain), mesh=line(world))
    train(plain, 0)
    train(model, 0)
    for m in (plain, model):
        m.layers[1][0].bias = None
    train(plain, 2)
    train(model, 2)
    same(model, plain)
    for m in (plain, model):
        m.layers[1] = nn.Identity()
    train(plain, 4)
    train(model, 4)
    same(model, plain)


@on_ranks(2)
def test_freezing_in_the_middle_of_an_accumulation(rank: int, world: int) -> None:
    for order in ((True, False, True), (False, True, True), (True, True, False)):
        plain, model = make(Mlp), None
        model = copy.deepcopy(plain)
        for layer in model.layers:
            sw.fully_shard(layer, mesh=line(world))
        sw.fully_shard(model, mesh=line(world))
        for i, trainable in enumerate(order):
            for m in (plain, model):
                m.layers[1].requires_grad_(trainable)
                if m is model:
                    m.set_requires_gradient_sync(i == 2)
                loss_of(m(batch(Mlp, i, 0))).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(p.grad), part(q.grad, p)), (order, name)


@on_ranks(2)
def test_registrations_elsewhere_change_nothing(rank: int, world: int) -> None:
    model = shard(blocks(), mesh=line(world))
    train(model, 0)
    before = [id(p) for p in model.parameters()]
    nn.Linear(3, 3)
    train(model, 2)
    assert [id(p) for p in model.parameters()] == before


@on_ranks(2)
def test_replaced_parameters_survive_what_comes_before_the_forward(rank: int, world: int) -> None:
    for strategy in STRATEGIES:
        for then in ("state_dict", "apply", "forward"):
            model = shard(blocks(), mesh=line(world), strategy=strategy)
            train(model, 0)
            twos = {k: torch.full_like(v, 2.0) for k, v in model.state_dict().items()}
            model.load_state_dict(twos, assign=True)
            model.layers[0].extra = nn.Parameter(torch.ones(3))
            if then == "state_dict":
                model.state_dict()
            elif then == "apply":
                model.float()
            else:
                model(batch(Mlp, 0, 0))
            for name, p in model.named_parameters():
                assert "extra" in name or (local(p) == 2).all(), (strategy, then, name)


@on_ranks(2)
def test_a_weight_that_is_set_around_an_unshard_is_not_lost(rank: int, world: int) -> None:
    """By assignment or straight into `_parameters`, before `unshard()` or before `reshard()`."""
    for strategy in STRATEGIES:
        for straight in (False, True):
            for before in (False, True):
                what = f"{strategy} straight={straight} before={before}"
                model = shard(blocks(), mesh=line(world), strategy=strategy)
                train(model, 0)
                inner, new = model.layers[0], nn.Parameter(torch.full((8, 8), 5.0))
                layer = inner[0]
                if not before:
                    inner.unshard()
                if straight:
                    layer._parameters["weight"] = new
                else:
                    layer.weight = new
                if before:
                    inner.unshard()
                    assert (layer.weight == 5).all(), what
                inner.reshard()
                assert (local(layer.weight) == 5).all(), what
                train(model, 2)


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embed(x))))


@on_ranks(2)
def test_a_tie_that_is_made_after_sharding(rank: int, world: int) -> None:
    """`tie_weights()` of models that are built on meta; before the first forward, and after it."""
    tokens = torch.arange(8)
    for strategy in STRATEGIES:
        for transport in TRANSPORTS:
            for apart in (False, True):
                for is_late in (False, True):
                    what = f"{strategy} {transport} units apart={apart} late={is_late}"
                    plain = make(Untied)
                    model, options = (
                        copy.deepcopy(plain),
                        {"strategy": strategy, "mesh": line(world)},
                    )
                    for module in (model.embed, model.head) if apart else ():
                        sw.fully_shard(module, transport=transport, **options)
                    sw.fully_shard(model, transport=transport, **options)
                    if is_late:
                        model(tokens)
                    losses: list[list[float]] = []
                    for m in (plain, model):
                        m.head.weight = m.embed.weight
                        optimizer = torch.optim.AdamW(m.parameters(), lr=0.05)
                        losses.append([])
                        for _ in range(3):
                            loss = m(tokens).square().mean()
                            loss.backward()
                            optimizer.step()
                            optimizer.zero_grad()
                            losses[-1].append(loss.item())
                    assert losses[0] == losses[1], what
                    assert model.head.weight is model.embed.weight, what
                    assert len(list(model.parameters())) == len(list(plain.parameters())), what


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_ties_across_units_stay_ties(rank: int, world: int) -> None:
    plain = make(Tied)
    model = shard(copy.deepcopy(plain), mesh=line(world))
    for step in range(0, 6, 2):
        train(plain, step)
        train(model, step)
        assert model.layers[2].weight is model.layers[0].weight
        same(model, plain)
        for m in (plain, model):
            m.layers[1].register_parameter(f"more{step}", nn.Parameter(torch.ones(3)))
