"""Gradient accumulation without reducing: `no_sync`, and `set_requires_gradient_sync` beneath it.

`.grad` of a parameter stands for the partial sum too: clearing it clears that sum, reading it
reduces it.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Branches,
    Mlp,
    Plain,
    Setting,
    Uneven,
    batch,
    full,
    loss_of,
    make,
    same_grads,
    same_weights,
    settings,
)
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import TransportError

EVERY = settings(*STRATEGIES, reshard=(False,))


class Collectives(TorchDispatchMode):
    """Counts c10d operations by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.lower()
            kind = next(
                (k for k in ("reduce_scatter", "allreduce", "allgather") if k in name), name
            )
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def backward(model: Any, step: int, rank: int) -> None:
    loss_of(model(batch(model, step, rank))).backward()


def both(cls: Any, setting: Setting, world: int) -> tuple[Any, Plain]:
    model = make(cls)
    oracle = Plain(model, world)
    return setting.shard(model, world), oracle


def data(steps: list[int], world: int, cls: Any = Uneven) -> list[list[torch.Tensor]]:
    return [[batch(cls, s, r) for s in steps] for r in range(world)]


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_an_exception_inside_puts_the_settings_back(
    setting: Setting, rank: int, world: int
) -> None:
    model, oracle = both(Uneven, setting, world)
    with pytest.raises(ZeroDivisionError), sw.no_sync(model):
        backward(model, 0, rank)
        raise ZeroDivisionError
    backward(model, 1, rank)
    oracle.backward(*data([0, 1], world))
    same_grads(model, oracle.grads(), str(setting))


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_nested(setting: Setting, rank: int, world: int) -> None:
    model, oracle = both(Uneven, setting, world)
    with sw.no_sync(model):
        with sw.no_sync(model):
            backward(model, 0, rank)
        backward(model, 1, rank)  # the inner one must not switch reducing on
    backward(model, 2, rank)
    oracle.backward(*data([0, 1, 2], world))
    same_grads(model, oracle.grads(), str(setting))


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_zero_grad_clears_what_was_not_reduced_yet(setting: Setting, rank: int, world: int) -> None:
    for set_to_none in (True, False):
        for through_optimizer in (True, False):
            model, oracle = both(Uneven, setting, world)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            with sw.no_sync(model):
                backward(model, 0, rank)
            (opt if through_optimizer else model).zero_grad(set_to_none=set_to_none)
            backward(model, 1, rank)
            oracle.backward(*data([1], world))
            same_grads(model, oracle.grads(), f"{setting} set_to_none={set_to_none}")


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_zero_grad_between_reduced_and_partial_gradients(
    setting: Setting, rank: int, world: int
) -> None:
    for set_to_none in (True, False):
        model, oracle = both(Uneven, setting, world)
        backward(model, 0, rank)
        with sw.no_sync(model):
            backward(model, 1, rank)
            model.zero_grad(set_to_none=set_to_none)
            backward(model, 2, rank)
        backward(model, 3, rank)
        oracle.backward(*data([2, 3], world))
        same_grads(model, oracle.grads(), f"{setting} set_to_none={set_to_none}")


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_a_step_inside_uses_the_mean_gradient(setting: Setting, rank: int, world: int) -> None:
    for clip in (False, True):
        model, oracle = both(Uneven, setting, world)
        opt, plain_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model))
        with sw.no_sync(model):
            backward(model, 0, rank)
            if clip:
                sw.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()
        oracle.backward(*data([0], world))
        if clip:
            torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.01)
        plain_opt.step()
        same_weights(model, oracle.weights(), str(setting), exact=not clip)


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_partial_gradients_after_a_step_inside_start_anew(
    setting: Setting, rank: int, world: int
) -> None:
    model, oracle = both(Uneven, setting, world)
    opt, plain_opt = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model))
    with sw.no_sync(model):
        backward(model, 0, rank)
        opt.step()
        opt.zero_grad()
        backward(model, 1, rank)
    backward(model, 2, rank)
    oracle.backward(*data([0], world))
    plain_opt.step()
    plain_opt.zero_grad()
    oracle.backward(*data([1, 2], world))
    same_grads(model, oracle.grads(), str(setting))


@on_ranks(2)
def test_without_recurse_only_the_named_unit_accumulates(rank: int, world: int) -> None:
    for setting in EVERY:
        model, oracle = both(Mlp, setting, world)
        first = model.layers[0]
        first.set_requires_gradient_sync(False, recurse=False)
        backward(model, 0, rank)
        first.set_requires_gradient_sync(True, recurse=False)
        backward(model, 1, rank)
        apart = copy.deepcopy(oracle)
        oracle.step(0)
        oracle.step(1)
        apart.backward(*data([0, 1], world, Mlp))
        expected = {
            n: apart.grads()[n] if n.startswith("layers.0") else g
            for n, g in oracle.grads().items()
        }
        same_grads(model, expected, str(setting))


@on_ranks(2)
def test_root_without_recurse_leaves_the_units_alone(rank: int, world: int) -> None:
    model, oracle = both(Mlp, Setting("full_shard"), world)
    model.set_requires_gradient_sync(False, recurse=False)
    with Collectives() as counter:
        backward(model, 0, rank)
    assert counter.counts["reduce_scatter"] == 3
    oracle.step(0)
    for name in ("layers.0.weight", "layers.2.bias"):
        p = model.get_parameter(name)
        assert torch.equal(full(p.grad), oracle.grads()[name])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_number_of_collectives(strategy: str, rank: int, world: int) -> None:
    """Four units: four reductions in a backward that reduces, none in one that does not."""
    model, _ = both(Mlp, Setting(strategy, "c10d"), world)
    kinds = {"no_shard": "allreduce"}
    for syncs in (True, False, False, True):
        model.set_requires_gradient_sync(syncs)
        loss = loss_of(model(batch(model, 0, rank)))
        with Collectives() as counter:
            loss.backward()
        wanted = {kinds.get(strategy, "reduce_scatter"): 4} if syncs else {}
        counter.counts.pop("allgather", None)
        assert counter.counts == wanted


@on_ranks(2)
def test_number_of_gathers(rank: int, world: int) -> None:
    """Per step with 3 layers and a root: see each row."""
    for options, expected in (
        ({"strategy": "full_shard"}, 8),  # forward and backward of every unit
        ({"reshard": True}, 8),
        ({"reshard": None}, 7),  # the root keeps its own
        ({"reshard": False}, 4),
        ({"strategy": "shard_grad_op"}, 4),
        ({"strategy": "shard_optimizer"}, 4),
        ({"strategy": "no_shard"}, 0),
    ):
        model, _ = both(Mlp, Setting(transport="c10d", **options), world)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with Collectives() as counter:
                backward(model, step, rank)
            assert counter.counts.get("allgather", 0) == expected, f"{options} step {step}"
            opt.step()


@on_ranks(2)
def test_partial_gradients_add_up_in_the_reduce_dtype(rank: int, world: int) -> None:
    """bf16 compute: 64 micro-batches of 2^-9 beside 1 would be lost in a bf16 sum."""
    policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for setting in EVERY:
        model = setting.shard(torch.nn.Linear(2, 2, bias=False), world, mp_policy=policy)
        sizes = [1.0] + [2.0**-9] * 64
        for i, size in enumerate(sizes):
            model.set_requires_gradient_sync(i == len(sizes) - 1)
            model(torch.full((1, 2), size)).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((2, 2), 1 + 64 * 2.0**-9))


@on_ranks(4)
def test_without_all_reduce_the_replicas_are_summed_later(rank: int, world: int) -> None:
    for setting in settings(*HYBRID_STRATEGIES):
        model, oracle = both(Uneven, setting, world)
        model.set_requires_all_reduce(False)
        backward(model, 0, rank)
        backward(model, 1, rank)
        model.set_requires_all_reduce(True)
        backward(model, 2, rank)
        oracle.backward(*data([0, 1, 2], world))
        same_grads(model, oracle.grads(), str(setting), exact=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_frozen_between_micro_batches_of_ranks_that_run_different_units(
    strategy: str, rank: int, world: int
) -> None:
    """A parameter that one rank has a sum of, and that is frozen by now, is reduced by all."""
    torch.manual_seed(0)
    plain = Branches()
    model: Any = Setting(strategy, "shared_memory").shard(copy.deepcopy(plain), world)
    x = torch.randn(2, world, 4, 8)
    routes = [[(0, 1), (1,), (2,)], [(0,), (0, 2), (0,)]]
    for micro in range(2):
        if micro == 1:
            for m in (plain, model):
                m.layers[0].bias.requires_grad_(False)
                m.layers[1].requires_grad_(False)
        losses = [plain(x[micro, r], *routes[micro][r]).square().mean() for r in range(world)]
        torch.stack(losses).mean().backward()
        with sw.no_sync(model) if micro == 0 else contextlib.nullcontext():
            model(x[micro, rank], *routes[micro][rank]).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(full(q.grad), p.grad, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_frozen_after_an_accumulation_that_failed_on_one_rank(
    strategy: str, rank: int, world: int
) -> None:
    """Its last backward reached the first layer on the other rank alone. What belonged to that
    accumulation is of no weight for the next one, on either rank.
    """
    for culprit in range(world):
        plain = make(Mlp)
        model: Any = Setting(strategy, "shared_memory").shard(copy.deepcopy(plain), world)
        with sw.no_sync(model):
            loss_of(model(batch(model, 0, rank))).backward()

        def fails(_: torch.nn.Module, args: Any, __: Any, culprit: int = culprit) -> None:
            def raises(_: torch.Tensor) -> None:
                raise ArithmeticError("boom")

            if rank == culprit:
                args[0].register_hook(raises)

        hook = model.layers[1].register_forward_hook(fails)
        with pytest.raises(ArithmeticError if rank == culprit else TransportError):
            loss_of(model(batch(model, 1, rank))).backward()
        hook.remove()
        model.zero_grad()
        torch.distributed.barrier()
        for m in (plain, model):
            m.layers[0].bias.requires_grad_(False)
        oracle = Plain(plain, world)
        oracle.step(0)
        loss_of(model(batch(model, 0, rank))).backward()
        assert model.layers[0].bias.grad is None
        same_grads(model, oracle.grads(), strategy)
