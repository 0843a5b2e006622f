"""The ledger: engines that are broken on purpose are found out at the end of the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_kit import Mlp, Setting, batch, expected, loss_of, make, same_grads, settings

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.arrivals import Arrivals
from shardwise.engine.core.backward import BackwardPass
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.gradients import BucketGrads, Gradients
from shardwise.engine.core.reduction import Reduction
from shardwise.engine.core.unit import Unit
from shardwise.errors import EngineError

WEIGHT = r"layers\.1\.weight"


def of_layer_1(bucket: BucketState) -> bool:
    return bucket.params[0].name == "layers.1.weight"


def drop(patch: Any) -> None:
    """A gradient that the engine was told of goes nowhere."""
    put = BucketGrads.put

    def forget_first(self: BucketGrads, arrived: Any) -> None:
        put(self, [a for a in arrived if not of_layer_1(self.state) or a[0] != 0])

    patch.setattr(BucketGrads, "put", forget_first)


def reduce_nothing(patch: Any) -> None:
    issue = Gradients.issue
    patch.setattr(
        Gradients,
        "issue",
        lambda self: [] if of_layer_1(self.buckets[0].state) else issue(self),
    )


def reduce_twice(patch: Any) -> None:
    issue = Gradients.issue
    patch.setattr(
        Gradients,
        "issue",
        lambda self: issue(self) + (issue(self) if of_layer_1(self.buckets[0].state) else []),
    )


def deliver_twice(patch: Any) -> None:
    deliver = Reduction._deliver

    def twice(self: Reduction, *args: Any) -> None:
        deliver(self, *args)
        if of_layer_1(self.grads.state):
            deliver(self, *args)

    patch.setattr(Reduction, "_deliver", twice)


def deliver_nothing(patch: Any) -> None:
    deliver = Reduction._deliver
    patch.setattr(
        Reduction,
        "_deliver",
        lambda self, *a: None if of_layer_1(self.grads.state) else deliver(self, *a),
    )


def collect_twice(patch: Any) -> None:
    put = BucketGrads.put

    def twice(self: BucketGrads, arrived: Any) -> None:
        put(self, [*arrived, *(a for a in arrived if of_layer_1(self.state) and a[0] == 0)])

    patch.setattr(BucketGrads, "put", twice)


def hear_nothing_of_a_parameter(patch: Any) -> None:
    """A hook that is lost."""
    deafen(patch, {0})


def hear_nothing_of_a_unit(patch: Any) -> None:
    """Neither hooks of the parameters nor the hook of the output: the backward seems never to
    come.
    """
    deafen(patch, {0, 1})
    pre = BackwardPass.pre_backward
    patch.setattr(
        BackwardPass,
        "pre_backward",
        lambda self, unit: None if unit.name == "layers.1" else pre(self, unit),
    )


def deafen(patch: Any, indices: set[int]) -> None:
    hook = Arrivals._hook

    def deaf(self: Arrivals, grads: BucketGrads, index: int, param: Any) -> None:
        if not of_layer_1(self._state) or index not in indices:
            hook(self, grads, index, param)

    patch.setattr(Arrivals, "_hook", deaf)


def keep(patch: Any) -> None:
    """A release that does nothing."""
    reshard = Unit.reshard
    patch.setattr(
        Unit, "reshard", lambda self, *after: self.name == "layers.1" or reshard(self, *after)
    )


BROKEN = {
    drop: rf"2 gradients arrived \({WEIGHT}, layers\.1\.bias\), 1 were collected",
    reduce_nothing: rf"gradients of {WEIGHT}, layers\.1\.bias were collected and not reduced.*"
    r"unit 'layers\.1' was reached by the backward",
    reduce_twice: rf"reduced 2 times in one backward without a new gradient \({WEIGHT}",
    deliver_twice: rf"1 reductions were issued, 2 delivered to \.grad of {WEIGHT}",
    deliver_nothing: rf"1 reductions were issued, 0 delivered to \.grad of {WEIGHT}",
    collect_twice: r"2 gradients arrived .*, 3 were collected: one was dropped, or counted twice",
    hear_nothing_of_a_parameter: rf"the gradient of {WEIGHT} is in its accumulator",
    hear_nothing_of_a_unit: rf"the gradient of {WEIGHT} is in its accumulator.*bias is in its",
    keep: r"unit 'layers\.1' is still gathered after its backward.*full_shard\) releases it",
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_a_broken_engine_is_found_out(fault: Any, transport: str, rank: int, world: int) -> None:
    """On every rank the error names parameter or unit, and rank; then the next step is right."""
    setting = Setting("full_shard", transport)
    model = setting.shard(make(Mlp), world)
    # Held between forward and backward, so that the unit needs no hook to be gathered again.
    model.layers[1].set_reshard_after_forward(False)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        loss = loss_of(model(batch(model, 0, rank)))
        with pytest.raises(EngineError, match=BROKEN[fault]) as caught:
            loss.backward()
        assert f"rank {rank}: " in str(caught.value)
        assert "zero_grad() and run the step again" in str(caught.value)
    if fault in (hear_nothing_of_a_parameter, hear_nothing_of_a_unit):
        return  # its hooks were never set
    model.zero_grad()
    loss_of(model(batch(model, 0, rank))).backward()
    same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], str(setting))


@on_ranks(2)
def test_a_buffer_that_forgets(rank: int, world: int) -> None:
    for transport in ("c10d", "shared_memory"):
        model = Setting("full_shard", transport).shard(make(Mlp), world)
        loss = loss_of(model(batch(model, 0, rank)))
        grads = model.layers[1]._shardwise_state.unit.gradients.buckets[0]
        open_ = grads.open

        def forgetful(*args: Any, grads: Any = grads, open_: Any = open_) -> None:
            open_(*args)
            buffer, had = grads.buffer, type(grads.buffer).had.fget
            without = property(lambda s: (False, *had(s)[1:]) if s is buffer else had(s))
            patch.setattr(type(buffer), "had", without)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grads, "open", forgetful)
            with pytest.raises(EngineError, match=rf"{WEIGHT} were collected and lost before"):
                loss.backward()


@on_ranks(2)
def test_what_is_no_fault(rank: int, world: int) -> None:
    """Forwards without a backward, two forwards, a part of the outputs, frozen and unused
    parameters, accumulation: the ledger is silent.
    """
    for setting in settings("full_shard", "shard_grad_op", "no_shard", reshard=(False,)):
        model = setting.shard(make(Mlp), world)
        x = batch(model, 0, rank)
        model(x)
        first, second = model(x), model(x)
        loss_of(first).backward()
        loss_of(second).backward()
        model.layers[2](torch.tanh(x)).sum().backward()
        model.layers[0].bias.requires_grad_(False)
        with sw.no_sync(model):
            loss_of(model(x)).backward()
        loss_of(model(x)).backward()
        loss = loss_of(model(x))
        loss.backward(retain_graph=True)
        for unit in (m._shardwise_state.unit for m in model.layers):
            for grads in unit.gradients.buckets:
                assert grads.tally.issued == grads.tally.num_told == grads.tally.waiting == 0


@on_ranks(2)
def test_full_parameters_that_user_code_unsharded(rank: int, world: int) -> None:
    """A loss on an unsharded parameter, without any forward, is reduced too."""
    for transport in ("c10d", "shared_memory"):
        model = Setting("full_shard", transport).shard(make(Mlp), world)
        model(batch(model, 0, rank))  # a root
        other = Setting("full_shard", transport).shard(make(Mlp), world)
        other.layers[1].unshard()
        (other.layers[1].weight * (rank + 1)).sum().backward()
        assert (other.layers[1].weight.grad.to_local() == 1.5).all()
