"""The order of events of a step, as text, and the memory that is held at each moment.

Three layers L0 L1 L2 and a root R with a norm of its own. AG gather, F forward, FR release, B
backward begins, RS reduction issued, G gradients delivered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_kit import KEPT, Mlp, Setting, batch, line, loss_of, make

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.inspect import gathered_bytes

LAYER_BYTES, ROOT_BYTES = (8 * 8 + 8) * 4, (8 + 8) * 4


def text(log: Any, *codes: str) -> str:
    return log.text(*codes).replace("layers.", "L").replace("(root)", "R")


def step_events(setting: Setting, rank: int, world: int, *codes: str) -> tuple[str, str]:
    """Forward and backward of the second step, after an optimizer step."""
    model = setting.shard(make(Mlp), world)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch(model, 0, rank))).backward()
    opt.step()
    with sw.record_events(model) as log:
        loss = loss_of(model(batch(model, 1, rank)))
        forward = text(log, *codes)
        log.clear()
        loss.backward()
    return forward, text(log, *codes)


MOVES = ("AG", "F", "FR", "B", "RS")
FULL_FORWARD = (
    "F R | AG R | F L0 | AG L0 | FR L0 | F L1 | AG L1 | FR L1 | F L2 | AG L2 | FR L2 | FR R"
)
KEPT_FORWARD = "F R | AG R | F L0 | AG L0 | F L1 | AG L1 | F L2 | AG L2"
FULL_BACKWARD = (
    "AG L2 | RS L2 | FR L2 | B L1 | AG L1 | RS L1 | FR L1 | B L0 | AG L0 | RS L0 | FR L0"
)
# c10d issues the gather of the next unit behind the one that is needed now; shared memory copies at
# once, so that there is nothing to overlap.
AHEAD_BACKWARD = (
    "AG L2 | AG L1 | RS L2 | FR L2 | B L1 | AG L0 | RS L1 | FR L1 | B L0 | RS L0 | FR L0"
)
PASS_BACKWARD = "RS L2 | FR L2 | B L1 | RS L1 | FR L1 | B L0 | RS L0 | FR L0"
KEPT_BACKWARD = "B R | RS R | B L2 | RS L2 | B L1 | RS L1 | B L0 | RS L0"
KEPT_ROOT = "B R | RS R | B L2 | FR R | "

# name -> setting, forward, backward on c10d, backward on shared memory
GOLDEN: dict[str, tuple[Setting, str, str, str]] = {
    "full_shard": (
        Setting("full_shard"),
        FULL_FORWARD,
        f"B R | AG R | RS R | B L2 | FR R | {AHEAD_BACKWARD}",
        f"B R | AG R | RS R | B L2 | FR R | {FULL_BACKWARD}",
    ),
    "root kept": (
        Setting(reshard=None),
        FULL_FORWARD.removesuffix(" | FR R"),
        KEPT_ROOT + AHEAD_BACKWARD,
        KEPT_ROOT + FULL_BACKWARD,
    ),
    "kept until backward": (
        Setting(reshard=False),
        KEPT_FORWARD,
        KEPT_ROOT + PASS_BACKWARD,
        KEPT_ROOT + PASS_BACKWARD,
    ),
    **{s: (Setting(s), KEPT_FORWARD, KEPT_BACKWARD, KEPT_BACKWARD) for s in KEPT},
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_order(name: str, transport: str, rank: int, world: int) -> None:
    setting, forward, *backwards = GOLDEN[name]
    found = step_events(Setting(setting.strategy, transport, setting.reshard), rank, world, *MOVES)
    assert found[0] == forward
    assert found[1] == backwards[transport == "shared_memory"]


@pytest.mark.parametrize("name", GOLDEN)
@on_ranks(2)
def test_every_reduction_is_delivered(name: str, rank: int, world: int) -> None:
    _, backward = step_events(GOLDEN[name][0], rank, world, "RS", "G")
    order = ["R", "L2", "L1", "L0"]
    events = backward.split(" | ")
    assert [e.removeprefix("RS ") for e in events if e.startswith("RS")] == order
    assert [e.removeprefix("G ") for e in events if e.startswith("G")] == order
    for unit in order:
        assert events.index(f"RS {unit}") < events.index(f"G {unit}")


@on_ranks(2)
def test_forward_prefetch(rank: int, world: int) -> None:
    """Gathers of the named units are issued before the forward of the module runs."""
    model = Setting("full_shard").shard(make(Mlp), world)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1], model.layers[2]])
    with sw.record_events(model) as log, torch.no_grad():
        model(batch(model, 0, rank))
    assert text(log, "AG", "F") == "F R | AG R | AG L0 | F L0 | AG L1 | AG L2 | F L1 | F L2"


@on_ranks(2)
def test_backward_prefetch(rank: int, world: int) -> None:
    model = Setting("full_shard", "c10d").shard(make(Mlp), world)
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    loss = loss_of(model(batch(model, 0, rank)))
    with sw.record_events(model) as log:
        loss.backward()
    events = text(log, "AG", "B").split(" | ")
    assert events.index("B L2") < events.index("AG L0") < events.index("B L1")


@on_ranks(2)
def test_prefetch_of_a_module_that_does_not_run(rank: int, world: int) -> None:
    """It is released at the end of the backward, and the step is right."""
    for ahead in ("forward", "backward"):
        model = Setting("full_shard", "c10d").shard(make(Mlp), world)
        model.spare = torch.nn.Linear(8, 8)
        sw.fully_shard(model.spare, mesh=line(world), transport="c10d")
        getattr(model.layers[1], f"set_modules_to_{ahead}_prefetch")([model.spare])
        for step in range(2):
            loss_of(model(batch(model, step, rank))).backward()
        assert gathered_bytes(model) == 0
        assert all(p.grad is None for p in model.spare.parameters())


def held(model: Any, rank: int) -> tuple[list[int], list[int]]:
    """Gathered bytes while each layer runs, in forward and in backward."""
    during: list[int] = []

    def look(*_: Any) -> None:
        during.append(gathered_bytes(model))

    for layer in model.layers:
        layer.register_forward_hook(look)
    loss = loss_of(model(batch(model, 0, rank)))
    forward = list(during)
    during.clear()
    for layer in model.layers:  # the gradient of its weight is on its way to `.grad`
        layer.weight.register_post_accumulate_grad_hook(look)
    loss.backward()
    return forward, during


@on_ranks(2)
def test_held_bytes_are_the_sum_of_the_layout(rank: int, world: int) -> None:
    """Under full_shard: the root's and one layer's; nothing at rest."""
    for transport in ("c10d", "shared_memory"):
        model = Setting("full_shard", transport).shard(make(Mlp), world)
        forward, _ = held(model, rank)
        assert forward == [ROOT_BYTES + LAYER_BYTES] * 3
        assert gathered_bytes(model) == 0
        for reshard, after in (
            (True, 0),
            (None, ROOT_BYTES),
            (False, ROOT_BYTES + 3 * LAYER_BYTES),
        ):
            model = Setting(None, transport, reshard).shard(make(Mlp), world)
            loss = loss_of(model(batch(model, 0, rank)))
            assert gathered_bytes(model) == after, f"{transport} {reshard}"
            loss.backward()
            assert gathered_bytes(model) == 0
        for strategy in ("shard_grad_op", "shard_optimizer"):
            model = Setting(strategy, transport).shard(make(Mlp), world)
            for _ in range(2):
                loss_of(model(batch(model, 0, rank))).backward()
                assert gathered_bytes(model) == ROOT_BYTES + 3 * LAYER_BYTES


@on_ranks(2)
def test_at_most_two_layers_in_backward(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    largest: list[int] = []
    loss = loss_of(model(batch(model, 0, rank)))
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            largest.append(gathered_bytes(model))
            return func(*args, **(kwargs or {}))

    with Watch():
        loss.backward()
    assert LAYER_BYTES <= max(largest) <= 2 * LAYER_BYTES
