"""Small programs, one for each thing that users do beside plain steps; most beside the plain model.

A case is a function of a context. It returns what it found, raises where something does not hold,
or returns the reason why it cannot run here as `{"state": "skipped", "why": ...}`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import shardwise as sw
from gpu_hour_parts import engines
from gpu_hour_parts.parity import TOLERANCE, difference, make_model, sgd, tokens_of, whole
from gpu_hour_parts.settings import Context, Row, Settings
from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder

CASES: dict[str, Callable[[Context], Row]] = {}


def case(function: Callable[[Context], Row]) -> Callable[[Context], Row]:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def items(settings: Settings) -> list[str]:
    return list(CASES)


def run(item: str, context: Context) -> Row:
    return CASES[item](context)


def sharded(context: Context, model: Any = None, **options: Any) -> Any:
    model = make_model(context) if model is None else model
    return engines.shard(
        "shardwise:full_shard", model, list(model.blocks), context, "fp32", **options
    )


def own(context: Context, step: int = 0) -> torch.Tensor:
    return tokens_of(context.rank, step, context)


def plain_gradients(context: Context, model: nn.Module, steps: Iterable[int] = (0,)) -> None:
    """The mean over ranks of sums over micro-batches, in `.grad` of a plain model."""
    for step in steps:
        for rank in range(context.world):
            (model(tokens_of(rank, step, context)) / context.world).backward()


def same(context: Context, found: Any, expected: nn.Module, what: str = "gradient") -> Row:
    """All gradients, or weights, of a sharded model beside those of a plain one."""
    worst, where = 0.0, ""
    plain = dict(expected.named_parameters())
    for name, param in found.named_parameters():
        pair = (param.grad, plain[name].grad) if what == "gradient" else (param, plain[name])
        assert pair[0] is not None and pair[1] is not None, f"{name} has no {what}"
        if (off := difference(whole(pair[0]), pair[1].detach())) > worst:
            worst, where = off, name
    worst = engines.largest(worst, context)
    assert worst <= TOLERANCE["fp32"], f"{what} of {where}: {worst:.1e} of its size off"
    return {"off": float(f"{worst:.1e}")}


# -- steps -----------------------------------------------------------------------------------------
@case
def accumulation(context: Context) -> Row:
    """Two backwards without reduction, a third with one."""
    model, plain = sharded(context), make_model(context)
    with sw.no_sync(model):
        model(own(context, 0)).backward()
        model(own(context, 1)).backward()
    model(own(context, 2)).backward()
    plain_gradients(context, plain, range(3))
    return same(context, model, plain)


@case
def clipping(context: Context) -> Row:
    model, plain = sharded(context), make_model(context)
    model(own(context)).backward()
    plain_gradients(context, plain)
    found = sw.clip_grad_norm_(model.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    off = difference(whole(found), expected)
    assert off <= TOLERANCE["fp32"], f"norm {float(whole(found))}, expected {float(expected)}"
    return same(context, model, plain)


@case
def recomputation(context: Context) -> Row:
    model, plain = make_model(context), make_model(context)
    model = sw.shard_model(
        model, mesh=engines.mesh_for("", context), transport="c10d", activation_checkpointing=True
    )
    model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def step_in_backward(context: Context) -> Row:
    model, plain = sharded(context), make_model(context)
    sw.step_in_backward(model, sgd(model.parameters()))
    optimizer = sgd(plain.parameters())
    for step in range(3):
        model(own(context, step)).backward()
        plain_gradients(context, plain, (step,))
        optimizer.step()
        optimizer.zero_grad()
    return same(context, model, plain, "weight")


@case
def tied_weights(context: Context) -> Row:
    config = DecoderConfig(dim=36, layers=2, heads=3, vocab_size=51, tie_embeddings=True)

    def make() -> Decoder:
        torch.manual_seed(2)
        return Decoder(config, 48).to(context.device.place)

    model, plain = sharded(context, make()), make()
    model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def unequal_counts_of_tokens(context: Context) -> Row:
    """`global_mean`: each rank takes another number of its losses."""
    width, count = 24, context.rank + 1

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        layers = [nn.Linear(width, width) for _ in range(2)]
        return nn.Sequential(*layers).to(context.device.place)

    def loss_sum(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.ones(rank + 1, width, device=context.device.place) * (rank + 1) / 8
        return model(x).square().mean(1).sum()

    model, plain = make(), make()
    engines.shard("shardwise", model, list(model), context, "fp32")
    sw.global_mean(loss_sum(model, context.rank), count).backward()
    total = context.world * (context.world + 1) / 2
    for rank in range(context.world):
        (loss_sum(plain, rank) / total).backward()
    return same(context, model, plain)


@case
def evaluation_between_steps(context: Context) -> Row:
    model, plain = sharded(context), make_model(context)
    with torch.no_grad():
        value = model(own(context))
        expected = plain(own(context))
    assert difference(value, expected) <= TOLERANCE["fp32"], "the loss of the evaluation is off"
    model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def exception_in_a_forward(context: Context) -> Row:
    """The step after it is right."""
    model, plain = sharded(context), make_model(context)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].register_forward_pre_hook(fail)
    try:
        model(own(context))
    except ZeroDivisionError:
        handle.remove()
    else:
        raise AssertionError("the exception did not arrive")
    model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def a_rank_that_is_late(context: Context) -> Row:
    model, plain = sharded(context), make_model(context)
    for _ in range(2):
        model.zero_grad()
        if context.rank == context.world - 1:
            time.sleep(0.1)
        model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def two_models_in_turn(context: Context) -> Row:
    models, plain = [sharded(context), sharded(context)], make_model(context)
    losses = [model(own(context)) for model in models]
    for loss in reversed(losses):
        loss.backward()
    plain_gradients(context, plain)
    return max((same(context, model, plain) for model in models), key=lambda row: row["off"])


# -- memory and files ------------------------------------------------------------------------------
@case
def offload_of_parameters(context: Context) -> Row:
    """Shards in pinned memory of the host, two steps."""
    model = sharded(context, offload_policy=sw.CPUOffloadPolicy())
    plain = make_model(context)
    ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
    for step in range(2):
        model(own(context, step)).backward()
        plain_gradients(context, plain, (step,))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    worst = 0.0
    for (_, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        local = param.to_local().detach()
        on = expected.detach() if context.world == 1 else None
        if context.device.is_accelerator:
            assert local.device.type == "cpu", f"a shard is on {local.device}"
        if on is not None:
            worst = max(worst, difference(local.cpu(), on.cpu()))
    if context.world > 1:  # gathers of host memory are Gloo's; the forward says the same
        with torch.no_grad():
            worst = difference(model(own(context)), plain(own(context)))
    worst = engines.largest(worst, context)
    assert worst <= TOLERANCE["fp32"], f"{worst:.1e} off"
    return {"off": float(f"{worst:.1e}")}


@case
def offload_of_activations(context: Context) -> Row:
    if not context.device.is_accelerator:
        return {"state": "skipped", "why": "needs a GPU"}
    model, plain = make_model(context), make_model(context)
    model = sw.shard_model(
        model, mesh=engines.mesh_for("", context), transport="c10d", offload_activations=True
    )
    model(own(context)).backward()
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def weights_from_meta(context: Context) -> Row:
    """`materialize` twice with one seed gives the same weights."""
    with torch.device("meta"):
        models = [
            Decoder(DecoderConfig(dim=36, layers=2, heads=3, vocab_size=51), 48) for _ in "ab"
        ]
    for model in models:
        sw.materialize(sharded(context, model), seed=7)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        assert bool(one.to_local().isfinite().all())
    return {}


@case
def checkpoint(context: Context) -> Row:
    """Saved, trained on, loaded: as it was."""
    model = sharded(context)
    optimizer = engines.adamw(model.parameters(), context)
    manager = sw.CheckpointManager(context.folder / "checkpoints")

    def step() -> None:
        model(own(context)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    manager.save(1, model, optimizer)
    before = [p.to_local().detach().clone() for p in model.parameters()]
    step()
    found, _ = manager.latest()
    assert found is not None, "no checkpoint is complete"
    manager.load(found, model, optimizer)
    for param, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), expected), "a weight changed"
    step()
    return {}


@case
def memory_of_a_model_that_is_gone(context: Context) -> Row:
    if not context.device.is_accelerator:
        return {"state": "skipped", "why": "needs a GPU"}

    def train() -> None:
        model = sharded(context)
        model(own(context)).backward()

    def allocated() -> int:
        gc.collect()
        context.device.synchronize()
        return context.device.module.memory_allocated()

    train()
    before = allocated()
    train()
    assert allocated() <= before, f"{allocated() - before:,} bytes stay"
    return {}


# -- streams ---------------------------------------------------------------------------------------
@case
def a_stream_of_the_user(context: Context) -> Row:
    """Forward and backward on a stream that is not the default one."""
    if not context.device.is_accelerator:
        return {"state": "skipped", "why": "needs a GPU"}
    module = context.device.module
    model, plain = sharded(context), make_model(context)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        model(own(context)).backward()
    module.current_stream().wait_stream(stream)
    plain_gradients(context, plain)
    return same(context, model, plain)


@case
def capture_into_a_graph(context: Context) -> Row:
    """Captured, or refused with an error; both are written down, and the next step has to be
    right."""
    if not context.device.is_cuda:
        return {"state": "skipped", "why": "needs a GPU"}
    model, plain = sharded(context), make_model(context)
    tokens = own(context)
    for _ in range(3):
        model(tokens).backward()
        model.zero_grad()
    context.device.synchronize()
    graph = torch.cuda.CUDAGraph()
    said = "captured"
    try:
        # The watchdog of NCCL asks for events in a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            model(tokens)
    except Exception as error:
        said = f"refused: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    context.device.synchronize()
    dist.barrier()
    model.zero_grad()
    model(tokens).backward()
    plain_gradients(context, plain)
    return {"said": said, **same(context, model, plain)}
