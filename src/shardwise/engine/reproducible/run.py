"""`reproducible`: the same numbers on any number of ranks, from Python.

    with reproducible(model, optimizer, num_micro_batches=12, seed=0) as run:
        for step in range(steps):
            for micro in run.micro_batches(step):      # the micro-batches of this rank
                loss = loss_of(model, batch(step, micro.index))
                loss.backward()                        # a mean over the micro-batch, not scaled
                micro.log(loss=loss)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(run.means()["loss"], float(norm))    # the same bits on 1, 2, 3, 8 ranks

Gradients are the mean over the micro-batches, summed in tree order (`sum_order`); they are in
`.grad` after the last round. Every micro-batch has random streams of its own. All ranks run equally
many passes, since they gather parameters together: where micro-batches do not fit the ranks, some
run a spare one, whose gradients and logged values are dropped. What would break the promise is
refused when the run begins (`reproducible_checks`).
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from shardwise.comm.exchange import groups_of, sum_over
from shardwise.engine.core.gradients import USUAL
from shardwise.engine.core.state import sharded_units
from shardwise.engine.reproducible.checks import check_run, written_buffers
from shardwise.engine.reproducible.order import SumOrder
from shardwise.errors import EngineError
from shardwise.layout.tree import Schedule


class MicroBatch:
    """One micro-batch of a step, as this rank runs it.

    Attributes:
        index: which of the step's `num_micro_batches` it is; read the data of this one.
        seed: of its random streams, for generators of your own.
        is_spare: another rank computes it too, and counts it; this pass keeps the ranks in step.
    """

    def __init__(self, index: int, seed: int, is_spare: bool) -> None:
        self.index, self.seed, self.is_spare = index, seed, is_spare
        self._logged: dict[str, torch.Tensor | float] = {}

    def log(self, **values: torch.Tensor | float) -> None:
        """Numbers whose means over the step `run.means()` gives: the same names in every one."""
        for name, value in values.items():
            self._logged[name] = value.detach() if isinstance(value, torch.Tensor) else value


class ReproducibleRun:
    """See the module docstring. Made by `reproducible`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        num_micro_batches: int,
        seed: int,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.num_micro_batches, self.seed = num_micro_batches, seed
        self._order: SumOrder | None = None
        self._logged: dict[int, dict[str, torch.Tensor | float]] = {}
        self._deterministic: tuple[bool, bool, bool] | None = None

    # -- on and off ------------------------------------------------------------------------------
    def __enter__(self) -> ReproducibleRun:
        units = sharded_units(self._model)
        check_run(self._model, units, self._optimizer, (self.num_micro_batches, self.seed))
        mesh = units[0].mesh
        schedule = Schedule(self.num_micro_batches, mesh.replicate.size, mesh.shard.size)
        self._deterministic = set_deterministic()  # may refuse: before a unit is in the run
        self._order = SumOrder(units, schedule, mesh.replicate.rank, mesh.shard.rank)
        for unit in units:
            unit.gradients.route = unit.mark.sum_order = self._order
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._order is not None:
            self._order.drop_sums()
            for unit in self._order.units:
                unit.gradients.route, unit.mark.sum_order = USUAL, None
        self._order = None
        if self._deterministic is not None:
            restore_deterministic(self._deterministic)

    # -- a step ----------------------------------------------------------------------------------
    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches of this rank, in order; random streams are set before each, and after
        the last, so that what follows draws the same on all ranks.

        Raises:
            EngineError: the backward of one did not run, or its forward wrote to a buffer.
        """
        order = self._running()
        self._begin_step(order)
        self._logged = {}
        before = written_buffers(self._model)
        for number in range(order.schedule.num_rounds):
            order.begin_round(number)
            leaf = order.leaf
            index = leaf if leaf is not None else order.spare_index
            micro = MicroBatch(index, stream_seed(self.seed, step, index), leaf is None)
            set_streams(micro.seed)
            yield micro
            self._check_round(order, micro, before)
            self._logged[-number - 1 if micro.is_spare else index] = micro._logged
        order.end_step()
        set_streams(stream_seed(self.seed, step, self.num_micro_batches))

    def _begin_step(self, order: SumOrder) -> None:
        """Whatever a step before has left, by an exception or a loop that ended early, goes."""
        order.end_step()
        for context in dict.fromkeys(c for u in order.units if (c := u.context) is not None):
            if context.backward is not None:
                context.abandon()
        order.drop_sums()

    def _check_round(
        self, order: SumOrder, micro: MicroBatch, before: dict[str, tuple[int, int]]
    ) -> None:
        if not order.reduced:
            raise EngineError(
                f"micro-batch {micro.index}: no gradient was reduced; call loss.backward() in the "
                "body of the loop, outside of no_sync()"
            )
        now = written_buffers(self._model)
        if changed := sorted(name for name in before if now.get(name) != before[name]):
            raise EngineError(
                f"buffer {', '.join(changed)}: written by the forward. Each rank sees other "
                "micro-batches, so what it holds depends on the number of ranks; compute it "
                "outside of the model, or keep it constant while training (BatchNorm: "
                "track_running_stats=False, or eval())"
            )

    def _running(self) -> SumOrder:
        if self._order is None:
            raise EngineError("this run is not on: use it in `with reproducible(...) as run:`")
        return self._order

    # -- numbers ---------------------------------------------------------------------------------
    def means(self) -> dict[str, float]:
        """Means over the step's micro-batches of what they logged: exact sums, rounded once.

        A small collective. The same on all ranks.
        """
        order = self._running()
        names = sorted(next(iter(self._logged.values()), {}))
        if any(sorted(values) != names for values in self._logged.values()):
            every = [sorted(values) for values in self._logged.values()]
            raise ValueError(f"micro-batches logged different names: {every}")
        rows = {
            index: [float(values[name]) for name in names]
            for index, values in self._logged.items()
            if index >= 0
        }
        table = self._table(order, rows, len(names))
        return {
            name: math.fsum(column) / self.num_micro_batches
            for name, column in zip(names, table.t().tolist(), strict=True)
        }

    def _table(self, order: SumOrder, rows: dict[int, list[float]], width: int) -> torch.Tensor:
        """[micro-batch, name] of all ranks: each row is filled in by one, so sums add zeros."""
        mesh = order.units[0].mesh
        table = torch.zeros(self.num_micro_batches, width, dtype=torch.float64)
        for index, row in rows.items():
            table[index] = torch.tensor(row, dtype=torch.float64)
        table = table.to(mesh.device)
        sum_over(table, groups_of(mesh.shard, mesh.replicate), "logged values of a step")
        return table.cpu()


def reproducible(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    num_micro_batches: int,
    seed: int = 0,
) -> ReproducibleRun:
    """A run whose losses, gradients and weights do not depend on the number of ranks.

    Any number of ranks and any strategy give the same bits, for one torch build, one type of
    processor and one number of threads; see docs/numerics.md.

    Args:
        model: sharded by `fully_shard` or `shard_model`; all its units on one mesh.
        optimizer: checked to work element by element; None: you vouch for yours.
        num_micro_batches: of a step, over all ranks. Any number; multiples of the ranks waste none.
        seed: of the random streams of every micro-batch, with step and index.

    Returns:
        A context manager; inside, torch's deterministic algorithms are on.

    Raises:
        ValueError: something in the model, its sharding or the optimizer would break the promise;
            names it and the remedy.
    """
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches: expected at least 1, found {num_micro_batches}")
    return ReproducibleRun(model, optimizer, num_micro_batches, seed)


# -- random streams and kernels ------------------------------------------------------------------
def stream_seed(seed: int, step: int, index: int) -> int:
    """A seed for one micro-batch of one step, unrelated to those of its neighbours."""
    mixed = np.random.SeedSequence([seed, step, index]).generate_state(1, np.uint64)[0]
    return int(mixed) % 2**63


def set_streams(seed: int) -> None:
    """Torch's generators (all devices), Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def set_deterministic() -> tuple[bool, bool, bool]:
    """Kernels that may differ from run to run raise an error that names them. Returns what was."""
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise ValueError(
            "CUBLAS_WORKSPACE_CONFIG is not set: cuBLAS may then choose kernels that differ from "
            "run to run. Set it to :4096:8 before the first CUDA call"
        )
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN costs a pass over memory and guards nothing here.
    memory.fill_uninitialized_memory = False
    return before


def restore_deterministic(before: tuple[bool, bool, bool]) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = before[2]
