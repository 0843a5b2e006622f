"""Plain PyTorch: the model on one rank, written without the engine. What all other runs must equal.

Gradients of the micro-batches of a step are summed in one tree (neighbours, then neighbours of
those) and divided by their number. Every micro-batch has random streams of its own, as in the
engine's reproducible runs, so that dropout draws the same.

Three things are looked at here that no number of ranks would show by itself: whether the same run
gives the same bits again, whether the mean over micro-batches is the loss of the whole batch, and
whether gradients reach tensors that are no parameters of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.ranks import Ranks
from shardwise.doctor.difference import Numbers, compare
from shardwise.doctor.plan import Plan, Row, Variant
from shardwise.engine.reproducible.run import set_streams, stream_seed
from shardwise.train import numerics
from shardwise.train.calling import outputs_of
from shardwise.train.config import Config, HFModelConfig
from shardwise.train.data import Data, open_data
from shardwise.train.loss.weights import weigh_in_tree
from shardwise.train.model import build_model, fill
from shardwise.train.optimizer import build_optimizer
from shardwise.train.order import Int64Array, SampleOrder
from shardwise.train.schedule import learning_rate, set_learning_rate

_RUNG = "1 plain"
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def run_baseline(plan: Plan) -> list[Row]:
    """Writes the numbers of every step, and returns what one rank alone can tell."""
    config = plan.config(Variant(1), "baseline").config
    numerics.set_up(config)
    torch.use_deterministic_algorithms(True)
    run = _Plain(plan, config)
    first = run.train(keep=True)
    again = _Plain(plan, config).train(keep=False)
    repeat = Row(_RUNG, "the same run twice", detail="to the last bit")
    if text := compare(again, first, "weight", exact=True):
        repeat.result, repeat.detail = "FAIL", f"after {plan.num_steps} steps: {text}"
    return [repeat, run.check_leaves(), run.check_whole_batch()]


def numbers_file(folder: Path, step: int) -> Path:
    return folder / f"baseline_{step}.pt"


def load_numbers(folder: Path, step: int) -> Numbers:
    stored = torch.load(numbers_file(folder, step), weights_only=True)
    return Numbers(stored["loss"], stored["grads"], stored["weights"])


class _Plain:
    """A model with its data and optimizer."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self.plan, self.config = plan, config
        self.data: Data = open_data(config, plan.search_dir)
        self.order = SampleOrder(len(self.data.train), config.run.seed)
        self.model = self._model()

    def _model(self) -> nn.Module:
        model = build_model(self.config, self.plan.search_dir)
        if isinstance(self.config.model, HFModelConfig):
            fill(model, self.config, torch.device("cpu"))
            return model
        waiting = [m for m in model.modules() if any(t.is_meta for t in _own_tensors(m))]
        if waiting:
            model.to_empty(device="cpu")
            torch.manual_seed(self.config.run.seed)
            for module in waiting:
                module.reset_parameters()  # type: ignore[operator]
        return model

    def train(self, keep: bool) -> dict[str, Tensor]:
        """All steps; the weights at the end. `keep`: writes the numbers of every step."""
        optimizer = build_optimizer(self.model, self.config.optim, fused=False)
        for step in range(1, self.config.train.steps + 1):
            set_learning_rate(optimizer, learning_rate(self.config, step))
            loss, grads = self.gradients(self.model, step)
            for name, param in self.model.named_parameters():
                param.grad = grads.get(name)
            optimizer.step()
            if keep:
                stored = {"loss": loss, "grads": grads, "weights": self.weights()}
                torch.save(stored, numbers_file(self.plan.folder, step))
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def gradients(self, model: nn.Module, step: int) -> tuple[float, dict[str, Tensor]]:
        """The mean over the micro-batches of a step."""
        model.train()
        num, losses, parts = self.plan.num_micro_batches, [], list[dict[str, Tensor]]()
        seed, read = self.config.run.seed, self.data.train
        weigh = weigh_in_tree(model, read, self._parts(step), Ranks(), seed, step)
        for index, batch in enumerate(self._batches(step)):
            set_streams(stream_seed(seed, step, index))
            model.zero_grad()
            loss = outputs_of(model, batch)["loss"] * weigh(batch)
            loss.backward()
            losses.append(loss.item())
            parts.append(_take_grads(model))
        names = {name: None for part in parts for name in part}
        zero = torch.zeros(())
        grads = {n: _tree_sum([p.get(n, zero) for p in parts]) / float(num) for n in names}
        return math.fsum(losses) / num, grads

    def _batches(self, step: int) -> Iterator[Any]:
        return map(self.data.train.batch, self._parts(step))

    def _parts(self, step: int) -> list[Int64Array]:
        size, num = self.config.train.micro_batch, self.plan.num_micro_batches
        return [self.order.indices((step * num - num + i) * size, size) for i in range(num)]

    # -- what one rank can tell ------------------------------------------------------------------
    def check_whole_batch(self) -> Row:
        """One forward over the whole batch must have the gradients of the mean over its parts."""
        row = Row(_RUNG, "a batch in parts and at once", detail="gradients within 1e-3: rounding")
        model = self._model().train()
        for module in model.modules():  # their masks follow the shape of the batch
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
        whole = self.data.train.batch(self.order.indices(0, self.config.train.global_batch))
        losses = []
        for seed in (1, 2):
            set_streams(seed)
            model.zero_grad()
            loss = outputs_of(model, whole)["loss"]
            loss.backward()
            losses.append(loss.item())
        if losses[0] != losses[1]:
            row.result, row.detail = "SKIP", "the model draws random numbers, other than Dropout's"
            return row
        at_once = _take_grads(model)
        _, in_parts = self.gradients(model, 1)
        if text := compare(in_parts, at_once, "gradient", exact=False):
            row.result = "FAIL"
            row.detail = f"{text}: the loss is no mean over samples{_likely_cause(model)}"
        return row

    def check_leaves(self) -> Row:
        """Gradients must reach parameters of the model only: nothing else is trained or sharded."""
        row = Row(_RUNG, "all that learns is a parameter")
        model = self._model().train()
        loss = outputs_of(model, next(self._batches(1)))["loss"]
        known = {id(p) for p in model.parameters()}
        strangers = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        if strangers:
            names = [_name_of(model, leaf) for leaf in strangers]
            row.result = "FAIL"
            row.detail = (
                f"{', '.join(names)}: takes part in the loss and wants gradients, but is in no "
                "unit and no optimizer; register it (nn.Parameter as an attribute, ParameterList)"
            )
        return row


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _take_grads(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _tree_sum(values: list[Tensor]) -> Tensor:
    while len(values) > 1:
        rest = values[len(values) & ~1 :]
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0] + 0.0


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward of `loss` would leave gradients in."""
    seen: set[Any] = set()
    found: list[Tensor] = []
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return found


def _name_of(model: nn.Module, tensor: Tensor) -> str:
    """Where a module holds a tensor that is not registered, e.g. `blocks.0.scales[1]`."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            path = f"{name}.{key}" if name else key
            if value is tensor:
                return path
            items = value.items() if isinstance(value, dict) else ()
            if isinstance(value, list | tuple):
                items = enumerate(value)
            for inner, item in items:
                if item is tensor:
                    return f"{path}[{inner!r}]"
    return f"a tensor of shape {list(tensor.shape)}"


def _likely_cause(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS):
            return (
                f" ({name or 'the model'}: {type(module).__name__} normalises each part by itself)"
            )
    return (
        " (e.g. a mean over unequal numbers of tokens: use shardwise.global_mean, or weigh parts)"
    )
