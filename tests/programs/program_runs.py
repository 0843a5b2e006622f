"""One random program: a sharded model and a plain one go the same way and must agree.

The plain model sees the data of all ranks, the sharded one on each rank its own. What is done with
both comes from one seed, the same on all ranks. Float64 and tolerances of 1e-7: sums over ranks
have another order than the plain sum; a gradient that is lost, doubled or of another parameter is
off by far more.

    a step     before: evaluate, generate, write, load, freeze, unshard, fail, copy, ...
               forwards and backwards: plain, accumulated, adapters switched in between, ...
               after: clip, scale, optimizer, write
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from program_models import KINDS, Block, Net, Route, random_route
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

import shardwise as sw

KEPT = ("no_shard", "shard_optimizer", "shard_grad_op")
HYBRID = ("hybrid_shard", "hybrid_full_optimizer", *KEPT)
MODES = ("any", "c10d", "shared_memory", "hybrid")
RTOL, ATOL = 1e-7, 1e-9


class MismatchError(AssertionError):
    """The sharded model and the plain one differ."""


@dataclass(frozen=True)
class Options:
    """What kind of programs: `mode` of `MODES`; `without` actions or kinds; `odds` of an action;
    the `device` of the sharded model.
    """

    mode: str = "any"
    without: tuple[str, ...] = ()
    odds: float = 0.09
    device: str = "cpu"


# What torch has no kernels for on devices that are not its own.
NOT_ON_DEVICES = ("sparse", "lstm", "gru")


@functools.cache
def mesh_of(device: str, *sizes: int) -> DeviceMesh:
    """Cached: process groups live as long as the rank process."""
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.cpu(), other.cpu()
    return one.shape == other.shape and torch.allclose(one, other, rtol=RTOL, atol=ATOL)


@dataclass
class Sharding:
    """How `fully_shard` is called; drawn once a program."""

    options: dict[str, Any]
    transport: str
    keeps: bool  # all copies stay between forwards, by strategy
    text: str = ""


def draw_sharding(rng: random.Random, world: int, chosen: Options) -> Sharding:
    mode, device = chosen.mode, chosen.device
    transport = mode if mode in ("c10d", "shared_memory") else None
    transport = transport or rng.choice(("c10d", "shared_memory"))
    transport = transport if device == "cpu" else "c10d"  # shared memory is the host's
    options: dict[str, Any] = {"transport": transport}
    is_hybrid = mode == "hybrid" or (mode == "any" and world == 4 and rng.random() < 0.35)
    if is_hybrid:
        options |= {"mesh": mesh_of(device, 2, world // 2), "strategy": rng.choice(HYBRID)}
    else:
        options["mesh"] = mesh_of(device, world)
        if rng.random() < 0.3:
            values = (True, False, None, 2) if world == 4 else (True, False, None)
            options["reshard_after_forward"] = rng.choice(values)
        else:
            options["strategy"] = rng.choice(("full_shard", *KEPT))
    strategy = options.get("strategy")
    text = f"{strategy or options.get('reshard_after_forward')} on {transport}"
    if rng.random() < 0.25:
        draws = random.Random(rng.random())

        def place(param: nn.Parameter) -> Shard | None:
            return Shard(draws.randrange(param.dim())) if param.dim() else None

        options["shard_placement_fn"] = place
        text += ", cut along drawn dims"
    return Sharding(options, transport, strategy in KEPT, text + (" (2-D)" if is_hybrid else ""))


def shard(net: Net, rng: random.Random, how: Sharding) -> None:
    """Some blocks as units, from the inside or from the outside; perhaps two as one unit."""
    options = how.options
    blocks = [m for m in net.modules() if isinstance(m, Block)]
    if rng.random() < 0.2 and net.blocks[0] is not net.blocks[1]:
        pair = [net.blocks[0], net.blocks[1]]
        sw.fully_shard(pair, **options)
        blocks = [b for b in blocks if b not in pair]
    for block in reversed(blocks) if rng.random() < 0.7 else blocks:
        if rng.random() < 0.75:
            own = dict(options)
            if own["mesh"].ndim == 1 and rng.random() < 0.2:
                how.keeps &= own.pop("strategy", None) is None
                own["reshard_after_forward"] = rng.choice((True, False))
            sw.fully_shard(block, **own)
    sw.fully_shard(net, **options)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    if name == "rmsprop":
        return torch.optim.RMSprop(params, lr=0.01, eps=1e-4, momentum=0.5)
    loop = {"foreach": True} if name == "foreach" else {"fused": True} if name == "fused" else {}
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4, amsgrad=name == "foreach", **loop)


BEFORE = ("evaluate", "generate", "write", "write_data", "load", "flip", "unshard", "reshard")
BEFORE += ("keep", "forward_fails", "backward_fails", "one_fails", "copy", "functional")
AFTER = ("clip", "skip", "evaluate", "write", "scale")
BETWEEN = ("nothing", "nothing", "nothing", "switch", "reference", "evaluate", "freeze", "again")


@dataclass
class Program:
    """Both models and what is drawn for them."""

    seed: int
    rank: int
    world: int
    options: Options
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(f"{self.seed} {self.world} {self.options.mode}")
        torch.manual_seed(self.seed)
        kinds = tuple(k for k in KINDS if k not in self.options.without)
        self.plain = Net(rng, kinds)
        self.plain.head.weight.requires_grad_(True)  # a loss always has a gradient
        self.net: Any = copy.deepcopy(self.plain)
        self.how = draw_sharding(rng, self.world, self.options)
        shard(self.net, rng, self.how)
        names = ("sgd", "rmsprop", "adamw", "foreach", "fused")
        self.optimizer = rng.choice(names)
        if any(p.is_complex() for p in self.plain.parameters()) and self.optimizer == "fused":
            self.optimizer = "adamw"  # the fused kernels take real numbers only
        self.optimizers = [optimizer_of(self.optimizer, m) for m in (self.plain, self.net)]
        # On shared memory ranks may run different blocks.
        self.ranks_differ = self.how.transport == "shared_memory" and rng.random() < 0.5
        self.batch = rng.choice((1, 2, 3))
        kinds_drawn = [b.kind for b in self.plain.blocks]
        differ = ", ranks differ" if self.ranks_differ else ""
        self.trace.append(f"{self.how.text}, {self.optimizer}{differ}, blocks {kinds_drawn}")

    # -- what both models see --------------------------------------------------------------------
    def data(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all ranks: (world, batch, width) and ids (world, batch)."""
        draws = torch.Generator().manual_seed(self.seed * 1000 + number)
        size = (self.world, self.batch)
        x = torch.randn(*size, self.plain.width, generator=draws)
        return x, torch.randint(0, 100, size, generator=draws)

    def routes(self, same: Route | None = None) -> list[Route]:
        """One a rank."""
        num = len(self.plain.blocks)
        first = same or random_route(self.rng, num)
        if not self.ranks_differ:
            return [first] * self.world
        return [
            first if self.rng.random() < 0.4 else random_route(self.rng, num)
            for _ in range(self.world)
        ]

    @staticmethod
    def loss_of(out: torch.Tensor, rank: int) -> torch.Tensor:
        return out.square().mean() * (1.0 + 0.1 * rank)

    def losses(self, number: int, routes: list[Route]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the plain model, the mean over all ranks' data; of the sharded one, its own."""
        x, ids = self.data(number)
        each = [self.loss_of(self.plain(x[r], ids[r], routes[r]), r) for r in range(self.world)]
        own = self.loss_of(self.net(x[self.rank], ids[self.rank], routes[self.rank]), self.rank)
        if not is_near(each[self.rank].detach(), own.detach()):
            raise MismatchError(f"loss {own.item()}, plain {each[self.rank].item()}")
        return torch.stack(each).mean(), own

    def params(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        pairs = zip(self.plain.named_parameters(), self.net.named_parameters(), strict=True)
        for (name, mine), (same_name, theirs) in pairs:
            assert name == same_name
            yield name, mine, theirs

    def units(self) -> list[Any]:
        return [m for m in self.net.modules() if isinstance(m, sw.FSDPModule)]

    def compare(self, what: str, *, grads: bool = False) -> None:
        bad = []
        for name, mine, theirs in self.params():
            if not is_near(mine.detach(), whole(theirs)):
                bad.append(f"weight {name}")
            if not grads:
                continue
            want, got = mine.grad, theirs.grad
            if (want is None) != (got is None):
                none = "plain" if want is None else "sharded"
                bad.append(f"gradient {name}: the {none} one is None")
            elif want is not None and not is_near(want, whole(got)):
                bad.append(f"gradient {name}")
        if bad:
            raise MismatchError(f"{what}: {'; '.join(bad[:6])} ({len(bad)} differ)")

    # -- a program -------------------------------------------------------------------------------
    def run(self) -> None:
        self.compare("before the first step")
        usual = random_route(self.rng, len(self.plain.blocks))
        for step in range(self.rng.randint(3, 5)):
            self.step(step, usual)

    def step(self, step: int, usual: Route) -> None:
        rng, without = self.rng, self.options.without
        before = [a for a in BEFORE if rng.random() < self.options.odds and a not in without]
        after = [a for a in AFTER if rng.random() < 0.15 and a not in without]
        between = rng.choice([b for b in BETWEEN if b not in without])
        num_micro = rng.choice((1, 1, 2, 3))
        sync = rng.choice(("each", "context", "flag")) if num_micro > 1 else "each"
        self.trace.append(
            f"step {step}: {', '.join(before) or 'nothing'} before; {num_micro} micro-batches, "
            f"sync {sync}, between {between}; after {', '.join(after) or 'nothing'}"
        )
        before.sort(key=lambda action: action == "unshard")  # last, or the others undo it
        for i, action in enumerate(before):
            getattr(self, f"do_{action}")(step * 100 + 50 + i)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        route = usual if rng.random() < 0.6 else random_route(rng, len(self.plain.blocks))
        routes = self.routes(route)
        for micro in range(num_micro):
            with self.accumulating(sync, is_last=micro == num_micro - 1):
                self.backward(step * 100 + micro, routes, between, num_micro)
        self.net.set_requires_gradient_sync(True)
        for unit in self.units():
            unit.reshard()
        for param in self.plain.parameters():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        self.compare(f"step {step}, gradients", grads=True)
        for action in after:
            getattr(self, f"do_{action}")(step * 100 + 80)
        if "skip" not in after:
            for optimizer in self.optimizers:
                optimizer.step()
        self.compare(f"step {step}, weights")

    def accumulating(self, sync: str, *, is_last: bool) -> AbstractContextManager[None]:
        if sync == "flag":
            self.net.set_requires_gradient_sync(is_last)
        return sw.no_sync(self.net) if sync == "context" and not is_last else nullcontext()

    def backward(self, number: int, routes: list[Route], between: str, num_micro: int) -> None:
        """Forwards and backwards of both; something happens between them."""
        if between in ("freeze", "switch"):
            # torch's checkpoint compares what is saved, which follows `requires_grad`.
            for module in (*self.plain.modules(), *self.net.modules()):
                if isinstance(module, Block):
                    module.is_checkpointed = False
        plain, own = self.losses(number, routes)
        if between == "again":
            more, more_own = self.losses(number + 30, routes)
            plain, own = plain + more, own + more_own
        elif between == "reference":
            self.switch(on=False)
            with torch.no_grad():
                self.losses(number + 30, routes)
            self.switch(on=True)
        elif between == "evaluate":
            with torch.no_grad():
                self.losses(number + 30, routes)
        elif between == "freeze":
            self.flip_one(clear=False)  # gathered forms know nothing of earlier micro-batches
        elif between == "switch" and self.plain.adapters():
            # The adapters' parameters are frozen for the backward, as the plain model has it.
            self.switch(on=False)
        (plain / num_micro).backward()
        (own / num_micro).backward()
        if between == "switch":
            self.switch(on=True)

    def switch(self, *, on: bool) -> None:
        self.plain.switch_adapters(on=on)
        self.net.switch_adapters(on=on)

    def flip_one(self, *, clear: bool = True) -> None:
        """Freeze or thaw one parameter, except for the one that every loss reaches."""
        pairs = [(mine, theirs) for name, mine, theirs in self.params() if name != "head.weight"]
        for param in self.rng.choice(pairs):
            if clear:
                param.grad = None
            param.requires_grad_(not param.requires_grad)

    # -- actions ---------------------------------------------------------------------------------
    def do_evaluate(self, number: int) -> None:
        for model in (self.plain, self.net):
            model.eval()
        with torch.no_grad():
            self.losses(number, self.routes())
        for model in (self.plain, self.net):
            model.train()

    def do_generate(self, number: int) -> None:
        """Ranks run different numbers of forwards on copies that are kept."""
        if not self.how.keeps:
            for unit in self.units():
                unit.unshard()
        everything: Route = [(i, "plain") for i in range(len(self.plain.blocks))]
        x, ids = self.data(number)
        with torch.no_grad():
            self.losses(number, [everything] * self.world)
            for _ in range(self.rng.choice((self.rank, self.world - self.rank, 2 * self.rank))):
                want = self.plain(x[self.rank], ids[self.rank], everything)
                got = self.net(x[self.rank], ids[self.rank], everything)
                if not is_near(want, got):
                    raise MismatchError("generation")
        if not self.how.keeps:
            for unit in self.units():
                unit.reshard()

    @torch.no_grad()
    def do_write(self, _number: int) -> None:
        for _, mine, theirs in self.params():
            mine.mul_(0.9)
            theirs.mul_(0.9)

    def do_write_data(self, _number: int) -> None:
        for _, mine, theirs in self.params():
            mine.data.copy_(mine.data * 0.95)
            theirs.data.copy_(theirs.data * 0.95)

    def do_load(self, _number: int) -> None:
        for model in (self.plain, self.net):
            scaled = {
                n: t * 0.97 if t.dtype.is_floating_point else t
                for n, t in model.state_dict().items()
            }
            model.load_state_dict(scaled)

    def do_flip(self, _number: int) -> None:
        self.flip_one()

    def do_unshard(self, _number: int) -> None:
        for unit in self.units():
            if self.rng.random() < 0.5:
                unit.unshard()

    def do_reshard(self, _number: int) -> None:
        for unit in self.units():
            unit.reshard()

    def do_keep(self, _number: int) -> None:
        kept = self.rng.random() < 0.5
        for unit in self.units():
            unit.set_reshard_after_forward(kept)
        if self.rng.random() < 0.5:
            self.net.set_reshard_after_backward(self.rng.random() < 0.5)

    def do_copy(self, _number: int) -> None:
        for (_, _, theirs), copied in zip(
            self.params(), copy.deepcopy(self.net).parameters(), strict=True
        ):
            if not torch.equal(whole(theirs), whole(copied)):
                raise MismatchError("a copy differs")

    def do_functional(self, number: int) -> None:
        """Fast weights: tensors of the caller's in the place of parameters."""
        x, ids = self.data(number)
        route = [(i, "plain") for i in range(len(self.plain.blocks))]
        names = {n for n, p in self.plain.named_parameters() if p.requires_grad}
        fast = [
            {
                n: p.detach().to(device, copy=True).requires_grad_()
                for n, p in self.plain.named_parameters()
                if n in names
            }
            for device in ("cpu", self.options.device)
        ]
        # Where a module has two names, torch leaves in the model what was passed.
        before = [(m._parameters, dict(m._parameters)) for m in self.plain.modules()]
        losses = [
            self.loss_of(functional_call(model, own, (x[self.rank], ids[self.rank], route)), 0)
            for model, own in zip((self.plain, self.net), fast, strict=True)
        ]
        for held, params in before:
            held.update(params)
        want, got = (
            torch.autograd.grad(loss, list(own.values()), allow_unused=True)
            for loss, own in zip(losses, fast, strict=True)
        )
        for name, mine, theirs in zip(fast[0], want, got, strict=True):
            if (mine is None) != (theirs is None):
                raise MismatchError(f"functional_call, {name}: one gradient is None")
            if mine is not None and not is_near(mine.to_dense(), theirs.to_dense()):
                raise MismatchError(f"functional_call, {name}")

    # -- failures --------------------------------------------------------------------------------
    def do_forward_fails(self, number: int) -> None:
        self.fail(number, ranks=range(self.world), in_backward=False)

    def do_backward_fails(self, number: int) -> None:
        self.fail(number, ranks=range(self.world), in_backward=True)

    def do_one_fails(self, number: int) -> None:
        """The others must hear of it; on c10d the job has to be started again after that."""
        if self.how.transport == "shared_memory":
            who, in_backward = self.rng.randrange(self.world), self.rng.random() < 0.5
            self.fail(number, ranks=(who,), in_backward=in_backward)

    def fail(self, number: int, *, ranks: Any, in_backward: bool) -> None:
        """An exception passes through the engine; after it the model holds shards."""
        x, ids = self.data(number)
        routes = self.routes()
        at = self.rng.randrange(len(routes[0]))
        own = x[self.rank].requires_grad_()
        if self.rank in ranks and in_backward:
            own.register_hook(raise_on_purpose)
        elif self.rank in ranks:
            self.net.fails_at = min(at, len(routes[self.rank]) - 1)
        has_failed = False
        try:
            self.loss_of(self.net(own, ids[self.rank], routes[self.rank]), 0).backward()
        except (ArithmeticError, RuntimeError) as error:
            self.trace.append(f"  failed as wanted: {type(error).__name__}")
            has_failed = True
        self.net.fails_at = None
        dist.barrier()
        plain = [name for name, p in self.net.named_parameters() if not isinstance(p, DTensor)]
        if plain and has_failed:  # a route may not lead through the hook that raises
            raise MismatchError(f"after an exception full parameters are registered: {plain[:4]}")
        if self.rng.random() < 0.5:
            self.net.reset_iter_state()
        for model in (self.net, self.plain):
            model.zero_grad()
        dist.barrier()

    # -- after the backward ----------------------------------------------------------------------
    def do_clip(self, _number: int) -> None:
        ours = self.rng.random() < 0.5
        clip = sw.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
        want = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5)
        got = whole(clip(self.net.parameters(), 0.5))
        # Ours adds squares in float32, hence the wider bound.
        if not torch.allclose(want.double(), got.double(), rtol=1e-5):
            raise MismatchError(f"norm {got.item()}, plain {want.item()}")
        for name, mine, theirs in self.params():
            if mine.grad is not None:
                found = whole(theirs.grad)
                if not torch.allclose(mine.grad, found, rtol=1e-5, atol=1e-7):
                    raise MismatchError(f"clipped gradient {name}")
                mine.grad.copy_(found)

    def do_scale(self, _number: int) -> None:
        for _, mine, theirs in self.params():
            if mine.grad is not None and theirs.grad is not None:
                mine.grad.mul_(0.5)
                theirs.grad.mul_(0.5)

    def do_skip(self, _number: int) -> None:
        """No optimizer step."""


def raise_on_purpose(_grad: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


def run_seed(rank: int, world: int, seed: int, options: Options) -> list[str]:
    """On every rank: the program of one seed; returns what it did, raises `MismatchError`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    program = None
    try:
        program = Program(seed, rank, world, options)
        program.run()
    except BaseException as error:
        for line in program.trace if program is not None else ():
            error.add_note(line)
        error.add_note(f"seed {seed} on {world} ranks, {options}")
        raise
    finally:
        torch.set_default_dtype(before)
    return program.trace


def run_seeds(rank: int, world: int, first: int, last: int, options: Options) -> int:
    for seed in range(first, last):
        run_seed(rank, world, seed, options)
    return last - first
