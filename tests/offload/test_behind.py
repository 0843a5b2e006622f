"""Steps in the background: the numbers are those of steps in the foreground, whenever the thread
gets to them, and whoever looks before waits for them. A thread that is slowed down takes longer
than anything that it could be overtaken by.
"""

from __future__ import annotations

import contextlib
import copy
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from engine.engine_kit import Blocks, Mlp, Setting, Uneven, batch, loss_of, make
from ranks import on_ranks
from shardwise import OffloadedOptimizer
from shardwise.engine.core.state import units_in
from shardwise.errors import OffloadError
from shardwise.offload import behind

STEPS = 3
SETTINGS = [
    Setting("full_shard"),
    Setting("full_shard", transport="shared_memory"),
    Setting("shard_grad_op"),
    Setting("shard_grad_op", transport="shared_memory"),
    Setting("no_shard"),
]


@contextlib.contextmanager
def slowed(seconds: float = 0.02) -> Iterator[None]:
    """Each step of the thread takes that long, at its begin and at its end."""
    original = behind._run

    def run(*args: Any) -> None:
        time.sleep(seconds)
        original(*args)
        time.sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind, "_run", run)
        yield


def adamw(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **how)


def in_background(model: nn.Module, **how: Any) -> OffloadedOptimizer:
    options = {"state": "cpu", "chunk_bytes": 2**16, **how}
    return OffloadedOptimizer(adamw(model), in_background=True, **options)


def train(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, *, keeps: bool = False
) -> list[Tensor]:
    """Clipping, a schedule of the learning rate, accumulation; gradients are cleared or zeroed."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    norms = []
    for step in range(STEPS):
        with sw.no_sync(model):
            loss_of(model(batch(model, 2 * step, rank))).backward()
        loss_of(model(batch(model, 2 * step + 1, rank))).backward()
        norms.append(sw.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=not keeps)
    return norms


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("keeps", [False, True], ids=["cleared", "zeroed"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@on_ranks(2, 3)
def test_the_bits_of_steps_in_the_foreground(
    rank: int, world: int, setting: Setting, keeps: bool
) -> None:
    plain, other = (setting.shard(make(Uneven), world) for _ in range(2))
    norms = train(plain, adamw(plain), rank, keeps=keeps)
    with slowed():
        assert train(other, in_background(other), rank, keeps=keeps) == norms
        found = weights(other)
    for name, expected in weights(plain).items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=str)
@on_ranks(2)
def test_units_step_beside_the_next_forward(rank: int, world: int, setting: Setting) -> None:
    """The last unit steps when the first layer computes; where peers read shards without being
    asked, all have stepped by then.
    """
    model = setting.shard(make(Mlp), world)
    optimizer = in_background(model)
    original, computes, num_stepped = behind._run, threading.Event(), 0

    def run(*args: Any) -> None:
        nonlocal num_stepped
        is_last = num_stepped == len(list(units_in(model))) - 1
        if is_last and setting.transport == "c10d":
            assert computes.wait(20), "the forward waits for a unit that it does not need yet"
        original(*args)
        num_stepped += 1

    def begins(*_: Any) -> None:
        if setting.transport != "c10d":
            assert num_stepped == len(list(units_in(model)))
        computes.set()

    loss_of(model(batch(model, 0, rank))).backward()
    optimizer.step()  # says in which order units are waited for
    loss_of(model(batch(model, 0, rank))).backward()
    model.layers[0].register_forward_pre_hook(begins)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind, "_run", run)
        optimizer.step()
        model(batch(model, 1, rank))
        optimizer.flush()
    assert computes.is_set()


@on_ranks(2)
def test_in_a_backward(rank: int, world: int) -> None:
    plain, other = (Setting("full_shard").shard(make(Blocks), world) for _ in range(2))
    sw.step_in_backward(plain, adamw(plain))
    sw.step_in_backward(other, optimizer := in_background(other))
    with slowed():
        for step in range(STEPS):
            for model in (plain, other):
                loss_of(model(batch(model, step, rank))).backward()
            assert all(p.grad is None for p in other.parameters())
            for group in optimizer.param_groups:
                group["lr"] *= 1.0
        found = weights(other)
    for name, expected in weights(plain).items():
        assert torch.equal(found[name], expected), name


@on_ranks(2)
def test_few_units_wait_in_a_backward(rank: int, world: int) -> None:
    """So gradients of a few units are there at once."""
    model = Setting("full_shard").shard(make(Mlp), world)
    sw.step_in_backward(model, optimizer := in_background(model))
    most, original = 0, behind.Behind._submit

    def submit(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal most
        original(self, *args, **kwargs)
        most = max(most, len(self._waiting()))

    with slowed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind.Behind, "_submit", submit)
        loss_of(model(batch(model, 0, rank))).backward()
        optimizer.flush()
    assert len(list(units_in(model))) > behind.LIMIT >= most > 0


def look(model: Any, optimizer: Any, how: str, folder: Path) -> Tensor:
    """What somebody sees of the first parameter, flat, who looks right behind a step."""
    name, first = next(iter(model.named_parameters()))
    if how == "detach":
        return first.detach().to_local().reshape(-1)
    if how == "data":
        return first.data.to_local().reshape(-1)
    if how == "to_local":
        return first.to_local().detach().reshape(-1)
    if how == "full_tensor":
        return first.full_tensor().detach().reshape(-1)
    if how == "state_dict":
        return model.state_dict()[name].to_local().reshape(-1)
    if how == "deepcopy":
        return dict(copy.deepcopy(model).named_parameters())[name].to_local().detach().reshape(-1)
    if how == "unshard":
        model.unshard()
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
        return dict(model.named_parameters())[name].detach().clone().reshape(-1)
    if how == "moments":
        return optimizer.state[first]["exp_avg"].to_local().reshape(-1)
    if how == "gradient":
        return first.grad.to_local().clone().reshape(-1)
    if how == "evaluation":
        with torch.no_grad():
            return model(batch(model, 7, 0)).reshape(-1)
    assert how == "checkpoint"
    manager = sw.CheckpointManager(folder)
    manager.save(1, model, optimizer)
    fresh = Setting("full_shard").shard(make(Mlp, seed=5), model_world(model))
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    manager.load(checkpoint, fresh, adamw(fresh))
    return dict(fresh.named_parameters())[name].to_local().detach().reshape(-1)


def model_world(model: Any) -> int:
    return next(model.parameters()).device_mesh.size()


@pytest.mark.parametrize(
    "how",
    [
        *("detach", "data", "to_local", "full_tensor", "state_dict", "deepcopy", "unshard"),
        *("moments", "gradient", "evaluation", "checkpoint"),
    ],
)
@on_ranks(2)
def test_whoever_looks_waits(rank: int, world: int, tmp_path: Path, how: str) -> None:
    seen = []
    for made in (adamw, in_background):
        model = Setting("full_shard").shard(make(Mlp), world)
        optimizer = made(model)
        with slowed(0.05):
            loss_of(model(batch(model, 0, rank))).backward()
            optimizer.step()
            seen.append(look(model, optimizer, how, tmp_path / made.__name__))
            if isinstance(optimizer, OffloadedOptimizer):
                optimizer.flush()
    assert torch.equal(*seen)


@on_ranks(2)
def test_writing_waits_too(rank: int, world: int) -> None:
    """What the user writes behind a step is not overwritten by it."""
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    with slowed(0.05):
        loss_of(model(batch(model, 0, rank))).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(2.0)
        optimizer.flush()
    assert all(w.eq(2.0).all() for w in weights(model).values())


@on_ranks(2)
def test_two_optimizers_share_a_unit(rank: int, world: int) -> None:
    plain, other = (Setting("full_shard").shard(make(Mlp), world) for _ in range(2))
    for model, is_behind in ((plain, False), (other, True)):
        params = list(model.parameters())
        halves: list[Any] = [torch.optim.AdamW(params[i::2], lr=0.05) for i in range(2)]
        if is_behind:
            halves = [OffloadedOptimizer(h, state="cpu", in_background=True) for h in halves]
        with slowed():
            for step in range(STEPS):
                loss_of(model(batch(model, step, rank))).backward()
                for half in halves:
                    half.step()
                    half.zero_grad()
            found = weights(model)
        if not is_behind:
            expected = found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@on_ranks(2)
def test_an_error_of_the_thread_is_raised_where_somebody_waits(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    loss_of(model(batch(model, 0, rank))).backward()

    def fail(*_: Any) -> None:
        raise OffloadError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind, "_run", fail)
        optimizer.step()
        with pytest.raises(OffloadError, match="the disk is full"):
            optimizer.flush()
    optimizer.close()


def test_parameters_of_no_unit_step_at_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = OffloadedOptimizer(
        torch.optim.SGD([weight], lr=1.0), state="cpu", in_background=True
    )
    weight.grad = torch.ones(3)
    with slowed():
        optimizer.step()
        assert weight.detach().eq(0.0).all()


@contextlib.contextmanager
def noted(model: Any) -> Iterator[list[str]]:
    """What the main thread does: `hand` a unit over, `wait` for its step, `run` and `back` of a
    layer. A wait stands before the gather of its unit.
    """
    events: list[str] = []
    units = {unit.mark: unit for unit in units_in(model)}

    def name_of(mark: Any) -> str:
        name = units[mark].name
        return name.removeprefix("layers.") if name.startswith("layers.") else "R"

    hand, finish = behind.Behind._submit, behind.Behind.finish_unit

    def submit(self: Any, gradients: Any, ready: Any) -> None:
        hand(self, gradients, ready)
        events.append(f"hand {name_of(next(iter(gradients))._mark)}")

    def finish_unit(self: Any, mark: Any) -> None:
        if mark in self._steps:
            events.append(f"wait {name_of(mark)}")
        finish(self, mark)

    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, i=i: events.append(f"run {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: events.append(f"back {i}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind.Behind, "_submit", submit)
        patch.setattr(behind.Behind, "finish_unit", finish_unit)
        yield events


def order_of(model: Any, optimizer: Any, rank: int, *, steps: bool) -> str:
    """Of the third step, when the order of units is known."""
    with noted(model) as events:
        for number in range(3):
            events.clear()
            loss_of(model(batch(model, number, rank))).backward()
            if steps:
                optimizer.step()
            optimizer.zero_grad()
    return " | ".join(events)


@on_ranks(2)
def test_order_beside_a_forward(rank: int, world: int) -> None:
    """Units are gathered one ahead: while 0 computes, 1 has to have stepped, and 2 has not."""
    model = Setting("full_shard").shard(make(Mlp), world)
    sw.set_prefetch(model, True)
    assert order_of(model, in_background(model), rank, steps=True) == (
        "wait R | wait 0 | wait 1 | run 0 | wait 2 | run 1 | run 2 | "
        "back 2 | back 1 | back 0 | hand R | hand 0 | hand 1 | hand 2"
    )


@on_ranks(2)
def test_order_beside_a_backward(rank: int, world: int) -> None:
    """A unit is handed over when its sums are delivered: one reduction is in flight."""
    model = Setting("full_shard").shard(make(Mlp), world)
    sw.set_prefetch(model, True)
    sw.step_in_backward(model, optimizer := in_background(model))
    assert order_of(model, optimizer, rank, steps=False) == (
        "wait R | wait 0 | wait 1 | run 0 | wait 2 | run 1 | run 2 | "
        "back 2 | hand R | back 1 | hand 2 | back 0 | hand 1 | hand 0"
    )


# -- faults that were found ----------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_a_gradient_that_a_step_reads_is_not_added_to(rank: int, world: int, strategy: str) -> None:
    """Two forwards before a step, and a backward of the second one behind it. With kept copies it
    gathers nothing, so nobody had waited.
    """
    ends = []
    for is_behind in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8))
        for module in (model[0], model):
            sw.fully_shard(module, strategy=strategy, transport="c10d")
        optimizer = OffloadedOptimizer(adamw(model), state="cpu", in_background=is_behind)
        with slowed(0.05):
            for step in range(2):
                losses = [model(torch.full((2, 8), step + i + 1.0)).sum() for i in range(2)]
                losses[0].backward()
                optimizer.step()
                losses[1].backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(weights(model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("what", ["state dict", "detach", "data", "copy into detach"])
@on_ranks(2)
def test_views_that_were_taken_before_wait_too(rank: int, world: int, what: str) -> None:
    seen = []
    for made in (adamw, in_background):
        model = Setting("full_shard").shard(make(Mlp), world)
        optimizer = made(model)
        name, first = next(iter(model.named_parameters()))
        views = {"state dict": model.state_dict()[name], "data": first.data}
        view: Any = views.get(what, first.detach())
        with slowed(0.05):
            loss_of(model(batch(model, 0, rank))).backward()
            optimizer.step()
            if what == "copy into detach":
                view.copy_(torch.ones(view.shape))
            seen.append(view.full_tensor())
            if isinstance(optimizer, OffloadedOptimizer):
                optimizer.flush()
        seen.append(first.full_tensor().detach())
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def failing_for_one(may_fail: threading.Event) -> Any:
    """A `_step` of the thread that fails for the second unit that it gets, by no OffloadError;
    not before it may, so that who asks for the step has handed out all units."""
    original, num = behind._step, 0

    def step(*args: Any) -> None:
        nonlocal num
        num += 1
        if num == 2:
            may_fail.wait(10.0)
            raise MemoryError("no room for a chunk")
        original(*args)

    return step


def fail(rank: int, world: int, ask: str) -> tuple[Any, OffloadedOptimizer]:
    """A model whose second unit has failed to step, and its optimizer, which was asked about it."""
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    loss_of(model(batch(model, 0, rank))).backward()
    may_fail = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behind, "_step", failing_for_one(may_fail))
        optimizer.step()
        may_fail.set()
        with pytest.raises(MemoryError, match="no room for a chunk"):
            getattr(optimizer, ask)()
    return model, optimizer


@on_ranks(2)
def test_a_unit_that_failed_ends_all_steps(rank: int, world: int) -> None:
    """Units behind it do not step, and nothing is saved."""
    _, optimizer = fail(rank, world, "flush")
    for use in (optimizer.step, optimizer.state_dict, optimizer.flush):
        with pytest.raises(OffloadError, match=r"a step has failed \(no room for a chunk"):
            use()
    optimizer.close()


@on_ranks(2)
def test_closing_tells_of_the_last_step(rank: int, world: int) -> None:
    model, optimizer = fail(rank, world, "close")
    for use in (optimizer.step, lambda: optimizer.load_state_dict(adamw(model).state_dict())):
        with pytest.raises(OffloadError, match="was closed; make another one"):
            use()


@on_ranks(2)
def test_an_interrupted_wait_forgets_nothing(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    name, first = next(iter(model.named_parameters()))
    before = first.full_tensor().detach().clone()
    original = behind.wait

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        behind.wait = original
        raise KeyboardInterrupt

    loss_of(model(batch(model, 0, rank))).backward()
    with slowed(0.1):
        optimizer.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(behind, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first.to_local()
        now = first.full_tensor().detach()
    assert not torch.equal(before, now), name


@on_ranks(1)
def test_a_second_thread_that_looks_waits_too(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    first = next(model.parameters())
    seen: list[Tensor] = []
    loss_of(model(batch(model, 0, rank))).backward()
    with slowed(0.1):
        optimizer.step()
        looks = [threading.Thread(target=lambda: seen.append(first.to_local().clone()))
                 for _ in range(3)]  # fmt: skip
        for look_at in looks:
            look_at.start()
        for look_at in looks:
            look_at.join(20)
        optimizer.flush()
    assert len(seen) == 3
    assert all(torch.equal(tensor, first.to_local()) for tensor in seen)


@on_ranks(1)
def test_a_child_reads_what_is_complete(rank: int, world: int) -> None:
    """A worker of a DataLoader is forked, without the thread that would step."""
    model = Setting("full_shard").shard(make(Mlp), world)
    optimizer = in_background(model)
    first = next(model.parameters())
    loss_of(model(batch(model, 0, rank))).backward()
    reading, writing = os.pipe()
    with slowed(0.1):
        optimizer.step()
        child = os.fork()
        if child == 0:
            os.write(writing, b"%.6f" % float(first.to_local().double().sum()))
            os._exit(0)
        ready, _, _ = select.select([reading], [], [], 20)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert ready, "the child waits for a thread that it does not have"
        optimizer.flush()
    assert os.read(reading, 100) == b"%.6f" % float(first.to_local().double().sum())
