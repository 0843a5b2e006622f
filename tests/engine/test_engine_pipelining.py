"""torch.distributed.pipelining over stages that are sharded: right gradients always, and under
`install()` one reduction a step instead of one for each micro-batch.

4 ranks are 2 stages by 2 data parallel ranks; 2 ranks are either of the two. The oracle adds the
gradients of one rank's micro-batches, then those of the ranks, as the engine does, and divides by
powers of two: with `install()` the numbers are bit-equal. Without it every micro-batch is reduced
by itself, which is another order of sums.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import full, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from beside import from_benchmarks
from ranks import on_ranks
from shardwise.errors import EngineError

MICRO, ROWS, WIDTH, LAYERS, STEPS = 4, 2, 8, 4, 2


@functools.cache
def grid(pipeline: int, data: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pipeline, data), mesh_dim_names=("pipeline", "shard"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def rows(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    x = torch.randn(MICRO * ROWS, WIDTH, generator=generator)
    return x, x.roll(1, -1)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def expected(steps: int, data: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of each step of one process that has all ranks' data."""
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(steps):
        total: dict[str, torch.Tensor] = {}
        for rank in range(data):
            model.zero_grad()
            for x, y in zip(*(t.chunk(MICRO) for t in rows(step, rank)), strict=True):
                loss_of(model(x), y).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                total[name] = p.grad + total[name] if name in total else p.grad
        for name, p in model.named_parameters():
            p.grad = total[name] / data / MICRO
        history.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
    return history


class Stage(nn.Module):
    """Some of the layers, under the names that they have in the whole."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def stages_of(schedule: str, mesh: DeviceMesh, **options: Any) -> list[Any]:
    """This rank's stages, sharded over the data parallel ranks: (index, stages in all, module)."""
    num_pipeline = mesh.size(0)
    num_stages = num_pipeline * (2 if is_looped(schedule) else 1)
    layers = dict(whole_model().named_children())
    per_stage = LAYERS // num_stages
    mine = []
    for index in range(mesh.get_local_rank(0), num_stages, num_pipeline):
        names = list(layers)[index * per_stage : (index + 1) * per_stage]
        stage = Stage({name: layers[name] for name in names})
        for unit in (*stage.layers.values(), stage):
            sw.fully_shard(unit, mesh=mesh["shard"], **options)
        mine.append((index, num_stages, stage))
    return mine


def is_looped(schedule: str) -> bool:
    return "Interleaved" in schedule


def run_steps(
    schedule: str, pipeline: int, data: int, *, exact: bool = True, **options: Any
) -> list[int]:
    """Train, compare all gradients; reductions of the rank's first stage in each step but the
    first, which runs the model once more to learn its shapes.
    """
    import torch.distributed.pipelining as pp

    mesh = grid(pipeline, data)
    mine = stages_of(schedule, mesh, **options)
    group = mesh.get_group("pipeline")
    stages = [
        pp.PipelineStage(module, index, num, torch.device("cpu"), group=group)
        for index, num, module in mine
    ]
    cls: Any = getattr(pp, schedule)
    run = cls(stages if is_looped(schedule) else stages[0], MICRO, loss_fn=loss_of)
    first, last = mesh.get_local_rank(0) == 0, mesh.get_local_rank(0) == pipeline - 1
    optimizer = torch.optim.SGD([p for _, _, m in mine for p in m.parameters()], lr=0.1)
    counts = []
    for step, want in enumerate(expected(STEPS, data)):
        x, y = rows(step, mesh.get_local_rank(1))
        with sw.record_events(mine[0][2]) as log:
            run.step(*((x,) if first else ()), **({"target": y} if last else {}))
        if step:
            counts.append(log.text("RS").count("RS"))
        for _, _, module in mine:
            for name, p in module.named_parameters():
                assert p.grad is not None, name
                same(full(p.grad), want[name.removeprefix("layers.")], name, exact=exact)
        optimizer.step()
        optimizer.zero_grad()
    return counts


SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
GRIDS = {2: ((2, 1), (1, 2)), 4: ((2, 2),)}


def units_a_stage(schedule: str, pipeline: int) -> int:
    """Its layers; the root has no parameters of its own."""
    return LAYERS // pipeline // (2 if is_looped(schedule) else 1)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(2, 4)
def test_one_reduction_a_step(schedule: str, transport: str, world: int) -> None:
    for pipeline, data in GRIDS[world]:
        with sw.install():
            counts = run_steps(schedule, pipeline, data, transport=transport)
        assert counts == [units_a_stage(schedule, pipeline)] * (STEPS - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_one_gather_a_step_where_units_stay(schedule: str) -> None:
    """Whatever the number of micro-batches; the schedule's own `unshard` is the only one where it
    has that.
    """
    benchmark = from_benchmarks("pipelines")
    for micro in (4, 8):
        with sw.install():
            found = benchmark.run("shardwise, install", schedule, micro, True, grid(2, 2))
        assert (found["gathers"], found["reductions"]) == (1, 1), micro
        assert found["difference"] <= benchmark.MOST_DIFFERENCE


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(4)
def test_without_install_each_micro_batch_is_reduced(schedule: str) -> None:
    counts = run_steps(schedule, 2, 2, exact=False)
    assert counts == [MICRO * units_a_stage(schedule, 2)] * (STEPS - 1)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@on_ranks(4)
def test_zero_bubble(transport: str) -> None:
    """Gradients of weights are computed apart, in an order of their own, and put on the full
    parameters.
    """
    with sw.install():
        counts = run_steps(
            "ScheduleInterleavedZeroBubble",
            2,
            2,
            exact=False,
            transport=transport,
            reshard_after_forward=False,
        )
    assert counts == [1]


@on_ranks(2)
def test_zero_bubble_with_released_parameters_is_refused(world: int) -> None:
    """The schedule would find no parameters in the graph, and train without gradients. Its calls,
    without a pipeline, where ranks would wait for those that met the error.
    """
    stage = stages_of("ScheduleGPipe", grid(1, world))[0][2]
    x = torch.ones(2, WIDTH, requires_grad=True)
    with sw.install():
        from torch.distributed.fsdp import fully_shard

        stage.set_requires_gradient_sync(False)
        torch.autograd.grad(stage(x).sum(), x)
        with pytest.raises(EngineError, match="reshard_after_forward=False"):
            fully_shard.state(stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]
    stage.set_requires_gradient_sync(True)
    stage(x).sum().backward()  # nothing is left behind


@on_ranks(2)
def test_state_of_a_stage(world: int) -> None:
    """The objects that the pipelining of torch 2.13 takes hold of."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    stage = stages_of("ScheduleGPipe", grid(1, world))[0][2]
    assert not isinstance(stage, FSDPModule)
    with sw.install():
        from torch.distributed.fsdp import fully_shard as installed

        assert isinstance(stage, FSDPModule) and installed is sw.fully_shard
        stage.set_requires_gradient_sync(False)
        for _ in range(2):
            stage(torch.ones(2, WIDTH)).sum().backward()
        stage.set_requires_gradient_sync(True)
        state = installed.state(stage)  # type: ignore[attr-defined]
        assert len(state._state_ctx.all_states) == 1 + LAYERS
        with sw.record_events(stage) as log:
            for each in state._state_ctx.all_states:
                for group in each._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        assert log.text("RS").count("RS") == LAYERS
        assert installed.state(nn.Linear(1, 1)) is None  # type: ignore[attr-defined]
    assert not hasattr(sw.fully_shard, "state") and fully_shard is not sw.fully_shard
