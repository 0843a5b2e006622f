"""Services around the step: token means, copies, full parameters, ties, users' collectives."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardwise
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes


class Net(nn.Module):
    """Two layers, a scale without dims, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.emb(ids))) * self.scale)


def ids_of(rank: int, i: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * i + rank)
    return torch.randint(0, 11, (3, 4), generator=generator)


def average(ref: nn.Module, world: int) -> None:
    for p in ref.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def assert_same(model: nn.Module, ref: nn.Module, what: str = "") -> None:
    """Weights and gradients; 1e-6: sums of two or four float32 numbers in another order."""
    want = dict(ref.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.detach().full_tensor(), want[name].detach(), rtol=1e-5, atol=1e-6, msg=what + name
        )
        assert (p.grad is None) == (want[name].grad is None), what + name
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad.full_tensor(), want[name].grad, rtol=1e-5, atol=1e-6, msg=what + name
            )


WRAPPINGS: dict[str, Any] = {
    "root": lambda m: [],
    "own units": lambda m: [m.emb, m.mix, m.head],
    "head first": lambda m: [m.head],
    "one list": lambda m: [[m.emb, m.head], m.mix],
}


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2, 3)
def test_ties_and_scalars_train_in_every_wrapping(rank: int, world: int, transport: str) -> None:
    for kind, units in WRAPPINGS.items():
        torch.manual_seed(3)
        model = Net()
        ref = copy.deepcopy(model)
        for unit in units(model):
            shardwise.fully_shard(unit, transport=transport)
        shardwise.fully_shard(model, transport=transport)
        opts = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, ref)]
        for i in range(3):
            for m in (model, ref):
                m(ids_of(rank, i)).square().mean().backward()
            average(ref, world)
            assert_same(model, ref, f"{kind}, step {i}: ")
            for opt in opts:
                opt.step()
                opt.zero_grad()
        assert model.head.weight is model.emb.weight
        assert gathered_bytes(model) == 0


@on_ranks(4)
def test_shards_over_a_smaller_world_between_forward_and_backward(rank: int, world: int) -> None:
    for transport in ("c10d", "shared_memory"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7))
        ref = copy.deepcopy(model)
        for layer in (model[0], model[2]):
            shardwise.fully_shard(layer, reshard_after_forward=2, transport=transport)
        shardwise.fully_shard(model, reshard_after_forward=2, transport=transport)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        loss = model(x).square().mean()
        between = model[0].weight
        assert between.to_local().shape == (5, 6), "half of the rows, not a quarter"
        assert torch.equal(between.full_tensor(), ref[0].weight)
        loss.backward()
        assert model[0].weight.to_local().shape[0] <= 3
        ref(x).square().mean().backward()
        average(ref, world)
        assert_same(model, ref)


@on_ranks(2)
def test_a_smaller_world_must_divide(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="must be a factor of the 2 ranks"):
        shardwise.fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


@on_ranks(2)
def test_token_mean_over_unequal_micro_batches(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    ref = copy.deepcopy(model)
    shardwise.fully_shard(model)
    sizes = [[1, 4], [6, 2]]  # by micro-batch and rank
    total = sum(map(sum, sizes))
    for i, by_rank in enumerate(sizes):
        model.set_requires_gradient_sync(i == 1)
        batches = [torch.full((n, 5), 0.1 * (i + r + 1)) for r, n in enumerate(by_rank)]
        loss = shardwise.global_mean(model(batches[rank]).square().sum(), by_rank[rank])
        loss.backward()
        for batch in batches:
            (ref(batch).square().sum() / total).backward()
    assert_same(model, ref)


@on_ranks(2)
def test_token_mean_read_in_the_middle_and_mixed(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    ref = copy.deepcopy(model)
    shardwise.fully_shard(model)
    with shardwise.no_sync(model):
        shardwise.global_mean(model(torch.ones(2 + rank, 5)).sum(), 2 + rank).backward()
        for r in range(world):
            (ref(torch.ones(2 + r, 5)).sum() / 5).backward()
        assert_same(model, ref)
        with pytest.raises(shardwise.errors.EngineError, match="mixed in one accumulation"):
            model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ValueError, match="expected a scalar"):
        shardwise.global_mean(torch.ones(3), 2)


@on_ranks(2)
def test_copies_are_sharded_and_independent(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = Net()
    ref = copy.deepcopy(model)
    shardwise.fully_shard(model.emb)
    shardwise.fully_shard(model)
    shardwise.register_fsdp_forward_method(model, "extra_repr")
    model(ids_of(rank))
    average_model, average_ref = copy.deepcopy(model), copy.deepcopy(ref)
    opts = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, ref)]
    for i in range(2):
        for m in (model, ref):
            m(ids_of(rank, i)).square().mean().backward()
        average(ref, world)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for a, m in ((average_model, model), (average_ref, ref)):
        with torch.no_grad():
            for p, q in zip(a.parameters(), m.parameters(), strict=True):
                p.lerp_(q, 0.25)
    assert_same(average_model, average_ref)
    assert_same(model, ref)
    out = average_model(ids_of(rank))
    torch.testing.assert_close(out, average_ref(ids_of(rank)))
    out.square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    assert average_model.head.weight is average_model.emb.weight


@on_ranks(2)
def test_full_parameters_within_a_budget(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = Net()
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    shardwise.fully_shard(model.mix)
    shardwise.fully_shard(model)
    for budget in (1, 200, 2**30):
        got = {n: t.clone() for n, t in shardwise.full_parameters(model, budget=budget)}
        assert list(got) == list(want)
        assert all(torch.equal(got[n], want[n]) for n in want)
        assert gathered_bytes(model) == 0


class Counting:
    """A user's collective, in the form that FSDP2 documents."""

    def __init__(self, run: Any) -> None:
        self.run, self.calls, self.staged = run, 0, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.staged += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **more: Any) -> Any:
        self.calls += 1
        return self.run(output_tensor, input_tensor, group=group, **more)


@on_ranks(2)
def test_collectives_of_the_user(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    ref = copy.deepcopy(model)
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    gather, scatter = Counting(dist.all_gather_single), Counting(dist.reduce_scatter_single)
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(scatter)
    seen: list[torch.Tensor] = []
    model[1].set_all_reduce_hook(lambda flat: seen.append(flat.clone()) or flat.mul_(2))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    for m in (model, ref):
        m(x).square().mean().backward()
    average(ref, world)
    for p in ref[1].parameters():
        p.grad *= 2
    assert_same(model, ref)
    assert (gather.calls, scatter.calls, len(seen)) == (2, 1, 1)
    assert gather.staged == 2 and scatter.staged == 1


@on_ranks(2)
def test_a_parameter_frozen_between_micro_batches_keeps_its_gradient(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    ref = copy.deepcopy(model)
    for layer in model:
        shardwise.fully_shard(layer)
    shardwise.fully_shard(model)
    x = torch.full((2, 5), 1.0 + rank)
    with shardwise.no_sync(model):
        model(x).sum().backward()
    ref(x).sum().backward()
    for m in (model, ref):
        m[0].bias.requires_grad_(False)
        m(x).square().sum().backward()
    average(ref, world)
    assert_same(model, ref)


@on_ranks(2)
def test_verdicts_over_shards_are_those_of_the_whole(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 7)
    whole = model.weight.detach().clone()
    shardwise.fully_shard(model)
    shards = model.weight.detach()
    for limit in (-9.0, 0.0, whole.max().item() - 1e-6, 9.0):
        assert bool((shards > limit).any()) == bool((whole > limit).any())
        assert bool((shards > limit).all()) == bool((whole > limit).all())
        counted = (shards > limit).any().double().full_tensor()
        assert counted == (whole > limit).any().double()
