"""Random models, random training: the engine against plain autograd, bit for bit.

A seed decides on the modules (nested units, lists as one unit, tied, frozen and unused parameters,
outputs of every form), on how the root calls them (again, side by side, checkpointed, written over,
detached), and on what is done with the model, one action after the other. All ranks have the same
data, so the mean over them is anyone's gradient, and a plain copy of the model is told to do the
same. A seed that fails is all that is needed to see it again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import STRATEGIES, TRANSPORTS, Setting, loss_of, same, same_grads, same_weights
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core import arrivals
from shardwise.errors import TransportError

SEEDS_A_TEST = 12
WIDTH = 8


@dataclass
class Output:
    """What a block may return, beside tensors, tuples and dicts."""

    hidden: torch.Tensor
    nothing: None = None


# How a block wraps its hidden tensor, and which part of that is used.
FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda h: h, lambda out: out),
    "view": (lambda h: h.view(-1, WIDTH).view_as(h), lambda out: out),
    "tuple": (lambda h: (h, h * 2.0, None), lambda out: out[0]),
    "both": (lambda h: (h, h.sin()), lambda out: out[0] + out[1]),
    "dict": (lambda h: {"h": h, "n": 1}, lambda out: out["h"]),
    "dataclass": (Output, lambda out: out.hidden),
}


def leave_no_loss(block: nn.Module | None) -> None:
    """For one that is checkpointed: a loss in it would run it again, perhaps outside its unit."""
    for module in block.modules() if block is not None else ():
        if isinstance(module, Block):
            module.leaves_loss = False


class Block(nn.Module):
    """A unit with parameters of several kinds, perhaps with a unit inside."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=rng.random() < 0.7)
        if rng.random() < 0.3:
            self.unused = nn.Parameter(torch.randn(3))
        self.inner = Block(rng, depth + 1) if depth < 2 and rng.random() < 0.4 else None
        self.calls_inner = rng.choice(("once", "chain", "apart", "checkpointed", "never"))
        self.form = rng.choice(list(FORMS))
        self.leaves_loss = rng.random() < 0.4
        if self.calls_inner == "checkpointed":
            leave_no_loss(self.inner)
        self.loss: torch.Tensor | None = None  # that no output shows

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.linear(x)) * self.gain + self.shift
        inner = self.inner
        if inner is not None and self.calls_inner != "never":
            if self.calls_inner == "checkpointed":
                hidden = checkpoint(inner.hidden, hidden, use_reentrant=False)
            else:
                before, hidden = hidden, inner.hidden(hidden)
            if self.calls_inner == "chain":
                hidden = inner.hidden(hidden)
            elif self.calls_inner == "apart":
                hidden = hidden * inner.hidden(before * 0.5)
        if self.leaves_loss:
            self.loss = (self.gain * x.detach()).square().mean()
        return FORMS[self.form][0](hidden)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Of a call; what a user of the block writes."""
        return FORMS[self.form][1](self(x))


OPS = ("call", "call", "call", "checkpoint", "reentrant", "add_", "write", "detached", "beside")
OPS += ("outside", "cut")


class Program(nn.Module):
    """Calls its blocks as the seed says."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rng, 0) for _ in range(rng.randint(2, 4)))
        self.norm = nn.LayerNorm(WIDTH)
        if rng.random() < 0.3:
            self.blocks[0].linear.weight = self.blocks[-1].linear.weight
        num = len(self.blocks)
        self.ops = [
            (rng.choice(OPS), rng.randrange(num), rng.randrange(num))
            for _ in range(rng.randint(2, 6))
        ]
        for op, i, _ in self.ops:
            if op == "checkpoint":
                leave_no_loss(self.blocks[i])
        self.fails_at = -1

    @property
    def is_reentrant(self) -> bool:
        return any(op == "reentrant" for op, _, _ in self.ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, (op, i, j) in enumerate(self.ops):
            if at == self.fails_at:
                raise ArithmeticError("on purpose")
            x = self.run(op, self.blocks[i], self.blocks[j], x)
        return self.norm(x)

    def run(self, op: str, one: Any, other: Any, x: torch.Tensor) -> torch.Tensor:
        if op in ("checkpoint", "reentrant"):
            return checkpoint(one.hidden, x, use_reentrant=op == "reentrant")
        if op == "beside":
            return one.hidden(x) + other.hidden(x) * x
        if op == "detached":
            return x + one.hidden(x.detach())
        if op == "outside":
            return x * self.norm.weight
        y: torch.Tensor = one.hidden(x)
        if op == "add_":
            y = y.clone() if y.is_leaf else y.add_(0.5)
        elif op == "write":
            y[:, : WIDTH // 2] = x[:, : WIDTH // 2]
        elif op == "cut":
            y = y.detach().requires_grad_(torch.is_grad_enabled())
        return y


class Run:
    """One model, plain or sharded, and what is done with it."""

    def __init__(self, model: Any, *, is_sharded: bool) -> None:
        self.model, self.is_sharded = model, is_sharded
        self.seen: list[torch.Tensor] = []  # numbers that both must find

    def loss(self, seed: int, *, of_leaf: bool = False) -> torch.Tensor:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.x = x.requires_grad_(of_leaf or self.model.is_reentrant)
        return loss_of(self.model(self.x))

    def losses(self) -> list[torch.Tensor]:
        """Those that blocks have left."""
        left = [m.loss for m in self.model.modules() if isinstance(m, Block)]
        return [loss for loss in left if loss is not None and loss.requires_grad]

    def clear(self, *, to_none: bool = True) -> None:
        for module in self.model.modules():
            if isinstance(module, Block):
                module.loss = None
        self.model.zero_grad(set_to_none=to_none)

    # -- actions ---------------------------------------------------------------------------------
    def step(self, s: int) -> None:
        self.loss(s).backward()

    def twice(self, s: int) -> None:
        loss = self.loss(s)
        loss.backward(retain_graph=True)
        loss.backward()

    def two_losses(self, s: int) -> None:
        (self.loss(s) + self.loss(s + 1) * 2.0).backward()

    def crossed(self, s: int) -> None:
        losses = self.loss(s), self.loss(s + 1)
        losses[1].backward()
        losses[0].backward()

    def left_first(self, s: int) -> None:
        loss = self.loss(s)
        for left in self.losses():
            left.backward(retain_graph=True)
        loss.backward()

    def left_later(self, s: int) -> None:
        loss = self.loss(s)
        left = self.losses()
        loss.backward(retain_graph=True)
        for other in left:
            other.backward(retain_graph=True)

    def left_together(self, s: int) -> None:
        loss = self.loss(s)
        torch.stack([loss, *self.losses()]).sum().backward()

    def accumulate(self, s: int) -> None:
        """Without sync, then with; what is there already would be added last."""
        self.clear()
        self.model.set_requires_gradient_sync(False) if self.is_sharded else None
        self.loss(s).backward()
        self.loss(s + 1).backward()
        self.model.set_requires_gradient_sync(True) if self.is_sharded else None
        self.loss(s + 2).backward()

    def of_input(self, s: int) -> None:
        if not self.model.is_reentrant:
            loss = self.loss(s, of_leaf=True)
            (grad,) = torch.autograd.grad(loss, [self.x], allow_unused=True)
            self.seen += [] if grad is None else [grad]

    def penalty(self, s: int) -> None:
        """Double backward."""
        if not self.model.is_reentrant:
            loss = self.loss(s, of_leaf=True)
            (grad,) = torch.autograd.grad(loss, [self.x], create_graph=True, allow_unused=True)
            (loss if grad is None else loss + grad.square().sum()).backward()

    def evaluate(self, s: int) -> None:
        loss = self.loss(s)
        with torch.no_grad():
            self.seen.append(self.loss(s + 1))
        loss.backward()

    def forward_only(self, s: int) -> None:
        self.seen.append(self.loss(s).detach())

    def forward_fails(self, s: int) -> None:
        self.model.fails_at = s % len(self.model.ops)
        with pytest.raises(ArithmeticError):
            self.loss(s)
        self.model.fails_at = -1

    def backward_fails(self, s: int) -> None:
        def fail(_grad: torch.Tensor) -> None:
            raise ArithmeticError("on purpose")

        loss = self.loss(s, of_leaf=True)
        self.x.register_hook(fail)
        # A rank that waits for a peer hears of the peer's exception first.
        with pytest.raises((ArithmeticError, TransportError)):
            loss.backward()
            raise ArithmeticError("the loss does not reach the input")
        self.clear()

    def flip(self, s: int) -> None:
        names = [n for n, _ in self.model.named_parameters()]
        param = self.model.get_parameter(names[s % len(names)])
        param.grad = None
        param.requires_grad_(not param.requires_grad)

    def scale(self, s: int) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.75)

    def update(self, s: int) -> None:
        torch.optim.SGD(self.model.parameters(), lr=0.25).step()
        self.clear(to_none=s % 2 == 0)

    def load(self, s: int) -> None:
        self.model.load_state_dict({n: t * 0.5 for n, t in self.model.state_dict().items()})

    def copied(self, s: int) -> None:
        self.clear()
        self.model = copy.deepcopy(self.model)


ACTIONS = [name for name, value in vars(Run).items() if callable(value) and name[0] != "_"]
ACTIONS = [name for name in ACTIONS if name not in ("loss", "losses", "clear")]


def shard(model: Any, rng: random.Random, world: int) -> Any:
    """Innermost first; perhaps two blocks as one unit."""
    setting = Setting(rng.choice(STRATEGIES), rng.choice(TRANSPORTS))
    options: dict[str, Any] = setting.options(world)
    if rng.random() < 0.2:
        options["reshard_after_forward"] = options.pop("strategy") != "full_shard"
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if rng.random() < 0.3:
        sw.fully_shard(list(model.blocks[:2]), **options)
        blocks = [b for b in blocks if b not in list(model.blocks[:2])]
    inner_first = sorted(blocks, key=lambda block: -block.depth)
    for block in inner_first if rng.random() < 0.5 else reversed(blocks):
        if rng.random() < 0.85:
            sw.fully_shard(block, **options)
    return sw.fully_shard(model, **options)


def attempt(run: Run, action: str, step: int) -> Exception | None:
    try:
        getattr(run, action)(step)
    except RuntimeError as error:  # of autograd: what it refuses is refused to both
        return error
    return None


def run_seed(seed: int, world: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plain = Run(Program(rng), is_sharded=False)
    actions = [rng.choice(ACTIONS) for _ in range(7)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "SMALL_BYTES", rng.choice((0, 4 * WIDTH, 2**18)))
        sharded = Run(shard(copy.deepcopy(plain.model), rng, world), is_sharded=True)
        for step, action in enumerate(actions):
            what = f"seed {seed}, action {step} of {actions}"
            refused = attempt(plain, action, step)
            found = attempt(sharded, action, step)
            if refused is not None or found is not None:
                assert refused is not None and found is not None, f"{what}: {refused!r} {found!r}"
                plain.clear()
                sharded.clear()
            exact = not plain.model.is_reentrant  # adds to `.grad` piece by piece
            want = {n: p.grad for n, p in plain.model.named_parameters()}
            for module in sharded.model.modules():
                if isinstance(module, sw.FSDPModule):
                    module.reshard()  # after a forward without a backward
            same_grads(sharded.model, want, what, exact=exact)
            weights = {n: p.detach() for n, p in plain.model.named_parameters()}
            same_weights(sharded.model, weights, what, exact=exact)
            for got, value in zip(sharded.seen, plain.seen, strict=True):
                same(got, value, what, exact=exact)


@pytest.mark.parametrize("part", range(4))
@on_ranks(2)
def test_random_programs(part: int, rank: int, world: int) -> None:
    for seed in range(part * SEEDS_A_TEST, (part + 1) * SEEDS_A_TEST):
        run_seed(seed, world)
