"""The order of work on an accelerator: nothing races, and no ordering call is there in vain.

One process on torch's fake group of 4 ranks (its collectives move nothing, which the detector does
not mind), and two ranks on Gloo. All configurations run without a race. Then each call that orders
work is left out in turn, everywhere: the detector has to notice.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from race_detector import Detector, LaneBlocks, Lanes, Operators, transport_class
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from ranks import spawn_ranks
from shardwise.comm import streams
from shardwise.comm.blocks import Blocks
from shardwise.comm.c10d import in_place as of_large
from shardwise.comm.c10d import transport
from shardwise.comm.kept import kept

WIDTH = 40


class Block(nn.Sequential):
    """A unit of `Stack`."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Stack(nn.Sequential):
    """Blocks of which the last may be left out; `tied`: the first two share a weight."""

    num_run = 4

    def __init__(self, width: int, *, tied: bool = False) -> None:
        super().__init__(*(Block(width) for _ in range(4)))
        if tied:
            self[1][0].weight = self[0][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self)[: self.num_run]:
            x = block(x)
        return x


def extend(model: nn.Module) -> None:
    """Hooks of the all-gather, which send copies."""

    def pre(local: torch.Tensor, mesh: DeviceMesh) -> Any:
        return (local.clone(),), None

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    for param in model.parameters():
        local = param._local_tensor  # type: ignore[attr-defined]
        local.fsdp_pre_all_gather = functools.partial(pre, local)
        local.fsdp_post_all_gather = post


def sharded(
    mesh: DeviceMesh,
    *,
    width: int = WIDTH,
    tied: bool = False,
    extends: bool = False,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    model: Any = Stack(width, tied=tied)
    sw.shard_model(model, unit="Block", mesh=mesh, transport="c10d", **options)
    if extends:
        extend(model)
    return model


def train(
    mesh: DeviceMesh,
    *,
    num_micro: int = 1,
    width: int = WIDTH,
    steps_early: bool = False,
    separate: bool = False,
    in_place: bool = False,
    syncs: bool = False,
    **options: Any,
) -> None:
    """Three steps with clipping, and prefetch as on an accelerator. `in_place`: all parameters
    count as large, and the backend starts collectives as one. `syncs`: each micro-batch does.
    """
    with in_place_for_all() if in_place else contextlib.nullcontext():
        model = sharded(mesh, width=width, **options)
        steps(model, num_micro, width, steps_early=steps_early, separate=separate, syncs=syncs)


@contextlib.contextmanager
def in_place_for_all() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_large, "LARGE_BYTES", 0)
        patch.setattr(transport.C10dTransport, "_coalesces", True)
        yield


def steps(
    model: Any, num_micro: int, width: int, *, steps_early: bool, separate: bool, syncs: bool
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if steps_early:
        sw.step_in_backward(model, optimizer)
    if separate:
        model.set_separate_reduce_scatter_group()
    for _ in range(3):
        for micro in range(num_micro):
            is_last = micro == num_micro - 1
            model.set_requires_gradient_sync(is_last or syncs)
            model.num_run = 3 if is_last and num_micro > 1 else 4  # one has sums only
            model(torch.randn(4, width)).square().mean().backward()
        if not steps_early:
            sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def evaluate(mesh: DeviceMesh, **options: Any) -> None:
    """Forwards without gradients between steps; copies that are kept, and written."""
    model = sharded(mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
            model(torch.randn(4, WIDTH))
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        model.num_run = 2  # what was gathered ahead is not used, and written next
        model(torch.randn(4, WIDTH))
        model.num_run = 4
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        model(torch.randn(4, WIDTH))


def fail(mesh: DeviceMesh, **options: Any) -> None:
    """Exceptions in a forward and in a backward, each followed by a step."""
    model = sharded(mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    for module in (model[2].register_forward_hook, model[1].register_full_backward_hook):
        hook = module(end)
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.randn(4, WIDTH)).square().mean().backward()
        hook.remove()
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def repeat(mesh: DeviceMesh, *, in_place: bool = False, **options: Any) -> None:
    """A reproducible step."""
    with contextlib.ExitStack() as stack:
        if in_place:
            stack.enter_context(in_place_for_all())
        model = sharded(mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run = stack.enter_context(sw.reproducible(model, optimizer, num_micro_batches=6, seed=0))
        for step in range(2):
            for _ in run.micro_batches(step):
                model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Inline:
    """A pool without a thread: the detector sees operators of this one only."""

    def submit(self, call: Callable[..., None], *args: Any) -> Future[None]:
        call(*args)
        (future := Future[None]()).set_result(None)
        return future


def step_behind(mesh: DeviceMesh, *, in_backward: bool, step_on: Any, **options: Any) -> None:
    """Units step on a lane of their own, in the background."""
    model = sharded(mesh, **options)
    optimizer = sw.OffloadedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        state="cpu" if step_on == "cpu" else "none",
        step_on=step_on,
        in_background=True,
    )
    assert optimizer._behind is not None
    optimizer._behind._pool = Inline()  # type: ignore[assignment]
    if in_backward:
        sw.step_in_backward(model, optimizer)
    for _ in range(3):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        if not in_backward:
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def alternate(mesh: DeviceMesh, **options: Any) -> None:
    """Two models on two streams of the user that nothing orders, and one model on both."""
    lanes: Any = streams.streams_for(torch.device("cpu"))
    both = [sharded(mesh, **options) for _ in range(2)]
    shared = sharded(mesh, strategy="shard_grad_op")
    with lanes.users(2) as users, torch.no_grad():
        for _ in range(3):
            for model, user in zip(both, users, strict=True):
                with user():
                    model(torch.randn(4, WIDTH))
        for user in users:
            with user():
                shared(torch.randn(4, WIDTH))


class TwoTypes(nn.Module):
    """A unit of two buckets."""

    runs_all = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, or the second one alone."""
        x = self.first(x) if self.runs_all else x
        return self.second(x.double()).float()


def read_sums(mesh: DeviceMesh, *, uneven: bool = False, **options: Any) -> None:
    """Buckets that have partial sums alone when they are reduced, in units that have more or not;
    at the end of a backward, and because somebody reads gradients.
    """
    width = 37 if uneven else WIDTH
    model: Any = nn.Sequential(*(TwoTypes(width) for _ in range(3)))
    for unit in model:
        sw.fully_shard(unit, mesh=mesh, transport="c10d", **options)
    sw.fully_shard(model, mesh=mesh, transport="c10d", **options)
    model.set_reduce_scatter_max_input_buffers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        for syncs in (False, True):
            model.set_requires_gradient_sync(syncs)
            model[0].runs_all = not syncs
            run = model[:2] if syncs else model
            x = torch.randn(4, width)
            for unit in run:
                x = unit(x)
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        model(torch.randn(4, width)).square().mean().backward()
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def read_sums_in_place(mesh: DeviceMesh) -> None:
    with in_place_for_all():
        read_sums(mesh)


def drop(mesh: DeviceMesh, **options: Any) -> None:
    """A model goes while its gather is under way, and something else takes its memory."""
    for _ in range(2):
        model: Any = sw.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, transport="c10d", **options)
        handle = model.unshard(async_op=True)
        del model, handle
        torch.randn(WIDTH, WIDTH)


def configurations(world: int) -> dict[str, Callable[[], None]]:
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    half = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    on_host = sw.CPUOffloadPolicy(pin_memory=False)
    run = functools.partial
    of_a_line = {
        "full_shard": run(train, line),
        "large": run(train, line, width=300),
        "uneven": run(train, line, width=37),
        "accumulation": run(train, line, num_micro=3),
        "large accumulation": run(train, line, num_micro=2, width=300),
        "bf16": run(train, line, mp_policy=half),
        "shard_grad_op": run(train, line, strategy="shard_grad_op"),
        "shard_optimizer": run(train, line, strategy="shard_optimizer"),
        "no_shard": run(train, line, strategy="no_shard"),
        "recomputation": run(train, line, activation_checkpointing=True),
        "selective recomputation": run(train, line, activation_checkpointing="selective"),
        "offloaded activations": run(train, line, offload_activations=True),
        "offload": run(train, line, offload_policy=on_host),
        "offload, accumulation": run(train, line, offload_policy=on_host, num_micro=3, syncs=True),
        "offload, step in backward": run(train, line, offload_policy=on_host, steps_early=True),
        "offload, bf16": run(train, line, offload_policy=on_host, mp_policy=half),
        "step in backward": run(train, line, steps_early=True),
        "tied": run(train, line, tied=True),
        "extension": run(train, line, extends=True),
        "separate group": run(train, line, separate=True),
        "in place": run(train, line, in_place=True),
        "in place, uneven": run(train, line, in_place=True, width=37),
        "in place, bf16": run(train, line, in_place=True, mp_policy=half),
        "in place, accumulation": run(train, line, in_place=True, num_micro=3),
        "evaluation": run(evaluate, line),
        "evaluation with kept copies": run(evaluate, line, strategy="shard_grad_op"),
        "exceptions": run(fail, line),
        "exceptions, no_shard": run(fail, line, strategy="no_shard"),
        "two streams of the user": run(alternate, line),
        "partial sums": run(read_sums, line),
        "partial sums, no_shard": run(read_sums, line, strategy="no_shard"),
        "partial sums, uneven, offload": run(read_sums, line, uneven=True, offload_policy=on_host),
        "partial sums in place": run(read_sums_in_place, line),
        "behind a backward": run(step_behind, line, in_backward=True, step_on="device"),
        "behind a forward": run(step_behind, line, in_backward=False, step_on="device"),
        "behind a forward, offload": run(
            step_behind, line, in_backward=False, step_on="cpu", offload_policy=on_host
        ),
        "behind a backward, offload": run(
            step_behind, line, in_backward=True, step_on="cpu", offload_policy=on_host
        ),
        "a model that goes": run(drop, line),
        "a model that goes, bf16": run(drop, line, mp_policy=half),
    }
    if world < 4:
        in_place = run(repeat, line, in_place=True)
        return {**of_a_line, "reproducible": run(repeat, line), "reproducible, in place": in_place}
    names = ("replicate", "shard")
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
    column = init_device_mesh("cpu", (world, 1), mesh_dim_names=names)
    return {
        **of_a_line,
        "shards of one rank": run(train, column, strategy="hybrid_full_optimizer"),
        "replicas of one rank": run(train, column, strategy="hybrid_shard"),
        "hybrid_shard": run(train, grid, strategy="hybrid_shard"),
        "partial sums, hybrid": run(read_sums, grid, strategy="hybrid_shard"),
        "partial sums, homes": run(read_sums, grid, strategy="hybrid_full_optimizer"),
        "hybrid_full_optimizer": run(train, grid, strategy="hybrid_full_optimizer"),
        "in place, hybrid": run(train, grid, in_place=True, strategy="hybrid_full_optimizer"),
    }


def races_of(left_out: frozenset[str] = frozenset()) -> tuple[dict[str, list[str]], set[str]]:
    """Run configurations on fresh streams, a mutant's until one races: the races of each, and what
    was called.
    """
    detector = Detector()
    operators, lanes = Operators(detector), Lanes(detector)
    lanes.left_out |= left_out
    blocks = LaneBlocks(detector)
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.MAKERS, "cpu", lambda device: lanes)
        patch.setattr(Blocks, "of_process", classmethod(lambda cls: blocks))
        lanes_class = transport_class(detector, operators, set(left_out))
        patch.setattr(transport, "C10dTransport", lanes_class)
        streams.streams_for.cache_clear()
        kept("transports").clear()
        with operators:
            for name, run in configurations(dist.get_world_size()).items():
                before = detector.num_launches
                run()
                found[name] = list(detector.races)
                assert detector.num_launches > before + 5, "the detector saw nothing"
                detector.races.clear()
                if left_out and found[name]:
                    break
    streams.streams_for.cache_clear()
    return found, lanes.seen


def examine(rank: int, world: int) -> dict[str, Any]:
    """In a process of its own, because torch's fake group is its default group."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    races, calls = races_of()
    calls |= {"work of gather", "work of reduce", "work of all_reduce"}
    mutants = {call: any(races_of(frozenset({call}))[0].values()) for call in sorted(calls)}
    return {"races": races, "mutants": mutants}


def examine_two(rank: int, world: int) -> dict[str, list[str]]:
    """The same with collectives that move something."""
    warnings.simplefilter("ignore")
    return races_of()[0]


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    with spawn_ranks(1, examine, backend=None) as group:
        (outcome,) = group.join(timeout_s=230)
    assert outcome.kind == "ok", outcome.text
    return outcome.value


@pytest.mark.timeout(240)
def test_nothing_races(examined: dict[str, Any]) -> None:
    assert len(examined["races"]) >= 25
    assert {name: races[:3] for name, races in examined["races"].items() if races} == {}


@pytest.mark.timeout(240)
def test_each_ordering_call_is_needed(examined: dict[str, Any]) -> None:
    unnoticed = [call for call, is_noticed in examined["mutants"].items() if not is_noticed]
    assert unnoticed == []
    assert len(examined["mutants"]) >= 11


def test_nothing_races_on_two_ranks() -> None:
    with spawn_ranks(2, examine_two) as group:
        outcomes = group.join(timeout_s=110)
    for outcome in outcomes:
        assert outcome.kind == "ok", outcome.text
        assert "reproducible" in outcome.value
        assert {name: races[:3] for name, races in outcome.value.items() if races} == {}
