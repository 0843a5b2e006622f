"""Corners found by running code that nobody wrote for this engine. Each went wrong before."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from engine_kit import Mlp, Setting, batch, loss_of, make, same_grads, units_of

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import unit_of
from shardwise.errors import EngineError


def sharded(model: Any, **options: Any) -> Any:
    for unit in units_of(model):
        sw.fully_shard(unit, **options)
    return sw.fully_shard(model, **options)


def averaged(model: nn.Module, group_size: int) -> dict[str, torch.Tensor | None]:
    """Gradients of a plain model, averaged over the ranks."""
    for p in model.parameters():
        if p.grad is not None:
            torch.distributed.all_reduce(p.grad)
            p.grad /= group_size
    return {n: p.grad for n, p in model.named_parameters()}


class TrainsInForward(Mlp):
    """Calls backward inside its own forward, as inner loops and auxiliary losses do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(super().forward(x))
        loss.backward()
        return loss.detach()


@on_ranks(2)
def test_backward_inside_a_forward(rank: int, world: int) -> None:
    """The phase of the forward was never left: on shared memory, all later passes of all models on
    that mesh went without fences and read weights from before their peers' optimizer steps.
    """
    model = make(TrainsInForward)
    plain = copy.deepcopy(model)
    sharded(model)
    for _ in range(2):
        model(batch(model, 0, rank))
        plain(batch(model, 0, rank))
    same_grads(model, averaged(plain, world))
    assert all(wire.depth == 0 for wire in unit_of(model).wires)
    assert model._shardwise_state.unit.context.depth == 0


SHAPES = ((4, 3), (5, 3), (1, 3), (5,))
NUMBERS: dict[str, Any] = {
    "sum of column norms": lambda p: p.norm(dim=0).sum(),
    "largest column norm": lambda p: p.norm(dim=0).max(),
    "norm of two norms": lambda p: torch.stack([p.norm(), p.norm(1)]).sum(),
    "sum of column maxima": lambda p: p.amax(0).sum(),
    "mean squared error": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "huber loss": lambda p: F.huber_loss(p, torch.zeros_like(p)) * 2,
    "place of the maxima": lambda p: p.argmax(0),
}


@on_ranks(2)
def test_numbers_of_partial_results() -> None:
    """Norms of parts were added up as if they were sums, means of unequal parts as if they were of
    equal ones, and shards without rows gave results of another shape.
    """
    for shape in SHAPES:
        module = nn.Module()
        module.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        whole = module.w.detach().clone()
        sw.fully_shard(module)
        for name, fn in NUMBERS.items():
            got = fn(module.w.detach()).full_tensor()
            torch.testing.assert_close(
                got, fn(whole), msg=lambda m, n=name, s=shape: f"{n} {s} {m}"
            )


WRITES: dict[str, Any] = {
    "a row": lambda w: w[1].zero_(),
    "a number": lambda w: w[1, 2].fill_(3),
    "by index": lambda w: w.__setitem__(0, 7.0),
    "rows": lambda w: w[1:3].copy_(torch.arange(6.0).view(2, 3)),
    "a row of rows": lambda w: w[1:][0].mul_(5),
    "columns": lambda w: w[:, 1].fill_(2),
    "by list": lambda w: w.__setitem__([0, 4], 9.0),
    "part of split": lambda w: w.split(2)[2].zero_(),
    "random row": lambda w: w.data[4].normal_(generator=torch.Generator().manual_seed(0)),
    "eye": nn.init.eye_,
}


@on_ranks(2)
def test_writes_to_rows_reach_the_parameter() -> None:
    """DTensor gathers a row into a copy, and what is written to it was lost: the row of an
    embedding's padding_idx, for one.
    """
    for name, write in WRITES.items():
        model = make(lambda: nn.Linear(3, 5))
        plain = copy.deepcopy(model)
        sw.fully_shard(model, strategy="shard_grad_op")
        x = torch.ones(2, 3)
        with torch.no_grad():
            model(x)
            write(model.weight)
            write(plain.weight)
            assert torch.equal(model.weight.full_tensor(), plain.weight), name
            assert torch.equal(model(x), plain(x)), f"{name}: a kept copy is used"


@on_ranks(2)
def test_padding_row_after_meta_init() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=3), nn.Linear(4, 4))
    sw.fully_shard(model)
    sw.materialize(model, seed=0)
    assert not model[0].weight.full_tensor()[3].any()


@on_ranks(2)
def test_asynchronous_checkpoint(rank: int) -> None:
    """Of a sharded parameter it copied the wrapper's own memory, which there is none of."""
    model = sharded(make(Mlp))
    want = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
    held: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(held)
    with torch.no_grad():
        saving = dcp.async_save(model.state_dict(), checkpoint_id=held[0])
        for p in model.parameters():
            p.zero_()
    saving.result()
    found = model.state_dict()
    dcp.load(found, checkpoint_id=held[0])
    for name, tensor in found.items():
        assert torch.equal(tensor.full_tensor(), want[name]), name
    if rank == 0:
        shutil.rmtree(held[0])


class KeepsItsGradient(torch.autograd.Function):
    """A product that hands on the gradient of its input only, as kernels do that add up the
    weight's by themselves.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (w,) = ctx.saved_tensors
        return grads[0] @ w, None


class OutOfBandLayer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepsItsGradient.apply(x, self.weight) + self.bias


@on_ranks(2)
def test_a_function_without_a_gradient_for_its_weight(rank: int, world: int) -> None:
    """A bare AssertionError in the backward."""
    model = make(Mlp)
    model.layers[1].__class__ = OutOfBandLayer
    plain = copy.deepcopy(model)
    sharded(model)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(batch(Mlp, step, rank))).backward()
        same_grads(model, averaged(plain, world))


@on_ranks(2)
def test_frozen_between_forward_and_backward(rank: int, world: int) -> None:
    """The layer got a gradient all the same, where a plain model's gets none."""
    model = make(Mlp)
    plain = copy.deepcopy(model)
    sharded(model)
    losses = [loss_of(each(batch(Mlp, 0, rank))) for each in (model, plain)]
    for each, loss in zip((model, plain), losses, strict=True):
        each.layers[1].requires_grad_(False)
        loss.backward()
    same_grads(model, averaged(plain, world))
    assert model.layers[1].weight.grad is None


class TiedByCall(nn.Module):
    """Uses a child's weight outside of the child's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.bias = nn.Linear(8, 4), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.enc(x)), self.enc.weight.t(), self.bias)


@on_ranks(2)
def test_weight_of_a_child_at_rest(rank: int) -> None:
    """The error spoke of a forward without a backward, while the forward was running."""
    model = make(TiedByCall)
    sw.fully_shard(model.enc)
    sw.fully_shard(model)
    with pytest.raises(EngineError, match=r"enc\.weight.*its unit is not running"):
        model(batch(Mlp, 0, rank))


@on_ranks(2)
def test_optimizer_of_gathered_parameters_after_a_replacement(rank: int, world: int) -> None:
    """The root is gathered when the optimizer is built, and laid out anew at the next forward."""
    model = Setting(None, "c10d").shard(make(Mlp), world)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    model(batch(model, 0, rank))  # no backward: the root's own parameters stay gathered
    model.norm.weight = nn.Parameter(torch.full((8,), 2.0))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch(model, 1, rank))).backward()
    opt.step()
    for name, p in model.named_parameters():
        assert not torch.equal(p.full_tensor(), before[name]), name
    assert not torch.equal(model.norm.weight.full_tensor(), torch.full((8,), 2.0))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(2, 3, dtype=torch.bool, device=x.device)
        hidden[:, 2] = not self.training
        return self.encoder(x, src_key_padding_mask=hidden)[:, 0]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_units_inside_of_an_encoder_layer(strategy: str, rank: int, world: int) -> None:
    """Evaluated, the layer would hand the parameters of all modules below to one kernel."""
    torch.manual_seed(0)
    plain = Encoder()
    model = copy.deepcopy(plain)
    for layer in model.encoder.layers:
        for module in (layer.self_attn, layer.linear1, layer):
            sw.fully_shard(module, strategy=strategy)
    sw.fully_shard(model, strategy=strategy)
    x = torch.ones(2, 3, 8).cumsum(1)
    for training in (False, True, False):
        for m in (plain, model):
            m.train(training)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
    for m in (plain, model):
        m.train()
        m(x).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
