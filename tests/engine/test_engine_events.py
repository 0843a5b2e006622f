"""The order of events of a step, as text, and the memory that is held at each moment.

Three layers L0 L1 L2 and a root R with a norm of its own. AG gather, F forward, FR release, B
backward begins, RS reduction issued, G gradients delivered.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_kit import KEPT, Mlp, Setting, batch, line, loss_of, make
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes

LAYER_BYTES, ROOT_BYTES = (8 * 8 + 8) * 4, (8 + 8) * 4


def text(log: Any, *codes: str) -> str:
    return log.text(*codes).replace("layers.", "L").replace("(root)", "R")


def step_events(
    setting: Setting, rank: int, world: int, *codes: str, ahead: bool | None = None
) -> tuple[str, str]:
    """Forward and backward of the second step, after an optimizer step."""
    model = setting.shard(make(Mlp), world)
    sw.set_prefetch(model, ahead)
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
# Where gathers run beside computing, that of the next unit is issued behind the one needed now.
AHEAD_FORWARD = (
    "F R | AG R | AG L0 | F L0 | AG L1 | FR L0 | F L1 | AG L2 | FR L1 | F L2 | FR L2 | FR R"
)
AHEAD_BACKWARD = "AG L1 | RS L2 | FR L2 | B L1 | AG L0 | RS L1 | FR L1 | B L0 | RS L0 | FR L0"
PASS_BACKWARD = "RS L2 | FR L2 | B L1 | RS L1 | FR L1 | B L0 | RS L0 | FR L0"
KEPT_BACKWARD = "B R | RS R | B L2 | RS L2 | B L1 | RS L1 | B L0 | RS L0"
KEPT_ROOT = "B R | RS R | B L2 | FR R | "
KEPT_ROOT_AHEAD = "B R | AG L2 | RS R | B L2 | FR R | "
KEPT_AHEAD = "F R | AG R | AG L0 | F L0 | AG L1 | F L1 | AG L2 | F L2"

# name -> setting; forward and backward without and with prefetching
GOLDEN: dict[str, tuple[Setting, tuple[str, str], tuple[str, str]]] = {
    "full_shard": (
        Setting("full_shard"),
        (FULL_FORWARD, f"B R | AG R | RS R | B L2 | FR R | {FULL_BACKWARD}"),
        (AHEAD_FORWARD, f"B R | AG R | AG L2 | RS R | B L2 | FR R | {AHEAD_BACKWARD}"),
    ),
    "root kept": (
        Setting(reshard=None),
        (FULL_FORWARD.removesuffix(" | FR R"), KEPT_ROOT + FULL_BACKWARD),
        (AHEAD_FORWARD.removesuffix(" | FR R"), KEPT_ROOT_AHEAD + AHEAD_BACKWARD),
    ),
    "kept until backward": (
        Setting(reshard=False),
        (KEPT_FORWARD, KEPT_ROOT + PASS_BACKWARD),
        (KEPT_AHEAD, KEPT_ROOT + PASS_BACKWARD),
    ),
    **{s: (Setting(s), (KEPT_FORWARD, KEPT_BACKWARD), (KEPT_AHEAD, KEPT_BACKWARD)) for s in KEPT},
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_order(name: str, transport: str, rank: int, world: int) -> None:
    """On CPU nothing is gathered ahead; on shared memory, which copies at once, nowhere."""
    setting, plain, ahead = GOLDEN[name]
    setting = Setting(setting.strategy, transport, setting.reshard)
    assert step_events(setting, rank, world, *MOVES) == plain
    expected = ahead if transport == "c10d" else plain
    assert step_events(setting, rank, world, *MOVES, ahead=True) == expected


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


class Watch(TorchDispatchMode):
    """The most bytes that are gathered at any operation."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.largest = model, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.largest = max(self.largest, gathered_bytes(self.model))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_gathered_at_a_time(transport: str, rank: int, world: int) -> None:
    """One layer beside the root; two where gathers run ahead; never more than the limit."""
    model = Setting("full_shard", transport).shard(make(Mlp), world)
    ahead = 2 if transport == "c10d" else 1
    for enabled, limit, layers in (
        (None, None, 1),
        (True, None, ahead),
        (True, ROOT_BYTES + LAYER_BYTES, 1),
        (True, ROOT_BYTES + 3 * LAYER_BYTES, 3 if transport == "c10d" else 1),
        (False, 2**30, 1),
    ):
        sw.set_prefetch(model, enabled, gather_limit=limit)
        for _ in range(2):  # the first records the order
            with Watch(model) as forward:
                loss = loss_of(model(batch(model, 0, rank)))
            with Watch(model) as backward:
                loss.backward()
        assert forward.largest == ROOT_BYTES + layers * LAYER_BYTES, (enabled, limit)
        assert backward.largest <= ROOT_BYTES + layers * LAYER_BYTES, (enabled, limit)
        assert gathered_bytes(model) == 0


@on_ranks(2)
def test_limits_that_cannot_be_held(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    need = ROOT_BYTES + LAYER_BYTES
    with pytest.raises(ValueError, match=rf"'layers.0' needs {need} bytes .*smaller units"):
        sw.set_prefetch(model, gather_limit=need - 1)
    kept = Setting("shard_grad_op").shard(make(Mlp), world)
    with pytest.raises(ValueError, match="keeps its gathered parameters"):
        sw.set_prefetch(kept, gather_limit=2**30)
    with pytest.raises(ValueError, match="no sharded module"):
        sw.set_prefetch(make(Mlp))


class Changing(Mlp):
    """Runs its layers in the order that it is told."""

    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return self.norm(x)


@on_ranks(2)
def test_order_that_changes(rank: int, world: int) -> None:
    """Left and skipped layers: the same gradients, nothing stays gathered, one pass to relearn."""
    plain = make(Changing)
    model = Setting("full_shard").shard(make(Changing), world)
    sw.set_prefetch(model, True)
    gathers = []
    for order in ((0, 1, 2), (0, 1, 2), (2, 0), (2, 0), (1, 1)):
        plain.order = model.order = order
        model.zero_grad()
        with sw.record_events(model) as log:
            loss = loss_of(model(batch(model, 0, 0)))
            gathers.append(text(log, "AG", "F"))
            loss.backward()
        assert gathered_bytes(model) == 0
        plain.zero_grad()
        loss_of(plain(batch(plain, 0, 0))).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert torch.equal(p.grad, q.grad.full_tensor()), name
    assert gathers == [
        "F R | AG R | F L0 | AG L0 | F L1 | AG L1 | F L2 | AG L2",
        "F R | AG R | AG L0 | F L0 | AG L1 | F L1 | AG L2 | F L2",
        "F R | AG R | AG L0 | F L2 | AG L2 | F L0",
        "F R | AG R | AG L2 | F L2 | AG L0 | F L0",
        "F R | AG R | AG L2 | F L1 | AG L1 | F L1 | AG L1",
    ]
