"""What only a GPU can show (mark `gpu`): programs beside a CPU, streams of the user, pinned memory,
a rank that dies under NCCL, CUDA graphs, two devices in one process.

None of it has run on a GPU. Bodies that need no CUDA run on the simulated device too, in `make
test-all`, so that they are known to work.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from engine.engine_kit import Blocks, Mlp, full
from ranks import Outcome, spawn_ranks
from simulated_device.programs import PROGRAMS, Place
from simulated_device.worlds import try_on_devices

pytestmark = pytest.mark.timeout(300)
KINDS = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("sim", marks=pytest.mark.long),
]
# Other random numbers on a GPU than on a CPU: dropout, weights that are drawn on the device.
DRAWN = {"dropout", "recomputation", "meta, materialize"}
# float32: sums in another order, over a few steps of AdamW. In half precision a gradient near zero
# may have another sign, by which AdamW goes: weights are not compared, only losses, near 1.
TOLERANCE, HALF_TOLERANCE = 2e-3, 3e-2


def try_on(kind: str, world: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """function(rank, world, *args) on ranks that have a device each."""
    if kind == "sim":
        return try_on_devices(world, function, *args, timeout_s=150.0)
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    with spawn_ranks(world, on_cuda, function, args, backend=None) as group:
        return group.join(150.0, 20.0)


def run_on(kind: str, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    outcomes = try_on(kind, world, function, *args)
    assert all(outcome.kind == "ok" for outcome in outcomes), [o.text for o in outcomes]
    return [outcome.value for outcome in outcomes]


def on_cuda(rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", rank=rank, world_size=world, device_id=torch.device("cuda", rank),
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    value = function(rank, world, *args)
    torch.cuda.synchronize()
    return value


# -- programs --------------------------------------------------------------------------------------
def beside_the_cpu(rank: int, world: int, kind: str, name: str, folder: Path) -> None:
    program = PROGRAMS[name][1]
    torch.manual_seed(0)
    expected = program(Place("cpu", rank, world, folder / "cpu"))
    torch.manual_seed(0)
    found = program(Place(kind, rank, world, folder / kind))
    is_half = any(word in name for word in ("fp16", "bf16"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        off = (tensor.float() - found[key].float()).abs().max() / tensor.float().abs().max()
        if not is_half or key == "losses":
            limit = HALF_TOLERANCE if is_half else TOLERANCE
            assert off <= limit, f"{key}: {off:.1e} of its largest value off"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "full_shard" else pytest.mark.long)
        for name in PROGRAMS
        if name not in DRAWN
    ],
)
def test_programs_beside_the_cpu(name: str, tmp_path: Path) -> None:
    run_on("cuda", PROGRAMS[name][0], beside_the_cpu, "cuda", name, tmp_path)


# -- streams and memory ----------------------------------------------------------------------------
def build(kind: str, world: int, **options: Any) -> Any:
    torch.manual_seed(1)
    model: Any = Blocks().to(kind)
    mesh = init_device_mesh(kind, (world,))
    for layer in model.layers:
        sw.fully_shard(layer, mesh=mesh, transport="c10d", **options)
    return sw.fully_shard(model, mesh=mesh, transport="c10d", **options)


def gradients(model: Any, kind: str) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 4 * model.features).view(4, -1).to(kind)
    model(x).square().mean().backward()
    return [full(p.grad).cpu() for p in model.parameters()]


def on_a_side_stream(rank: int, world: int, kind: str) -> None:
    expected = gradients(build(kind, world), kind)
    module = torch.get_device_module(kind)
    model, stream = build(kind, world), module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        found = gradients(model, kind)
    module.current_stream().wait_stream(stream)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_on_a_stream_of_the_user(kind: str) -> None:
    run_on(kind, 2, on_a_side_stream, kind)


def with_pinned_shards(rank: int, world: int, kind: str) -> None:
    model = build(kind, world, offload_policy=sw.CPUOffloadPolicy())
    gradients(model, kind)
    for param in model.parameters():
        assert param.to_local().device.type == param.grad.to_local().device.type == "cpu"
        assert param.to_local().is_pinned()


@pytest.mark.parametrize("kind", KINDS)
def test_shards_on_the_host_are_pinned(kind: str) -> None:
    run_on(kind, 2, with_pinned_shards, kind)


# -- what goes wrong -------------------------------------------------------------------------------
def until_a_rank_dies(rank: int, world: int, kind: str) -> None:
    model = build(kind, world)
    for step in range(1000):
        if step == 2 and rank == 1:
            os._exit(7)
        gradients(model, kind)
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_when_a_rank_dies_the_others_end_with_an_error(kind: str) -> None:
    """By NCCL's watchdog or by an error of ours, but they end."""
    survivor, dead = try_on(kind, 2, until_a_rank_dies, kind)
    assert dead.kind == "died"
    assert survivor.kind in ("failed", "died"), survivor.text


# -- CUDA alone ------------------------------------------------------------------------------------
def captured(rank: int, world: int) -> str:
    """A capture of the forward either gives what a forward gives, or is refused with an error; the
    next step is right either way.
    """
    expected = gradients(build("cuda", world), "cuda")
    model, graph, said = build("cuda", world), torch.cuda.CUDAGraph(), "captured"
    x = torch.linspace(-1, 1, 4 * model.features).view(4, -1).to("cuda")
    with torch.no_grad():
        value = model(x)
        torch.cuda.synchronize()
        try:
            # The watchdog of NCCL asks for events in a thread of its own meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                kept = model(x)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.allclose(kept, value, rtol=1e-4), "the graph computes something else"
        except RuntimeError as error:
            said = str(error)
    for one, other in zip(gradients(model, "cuda"), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
    return said


@pytest.mark.gpu
def test_capture_into_a_graph_is_right_or_refused() -> None:
    said = run_on("cuda", 1, captured)
    assert all(said)


def two_models(rank: int, world: int) -> None:
    torch.manual_seed(1)
    plain = Mlp()
    models = []
    for index in range(2):
        torch.cuda.set_device(index)
        torch.manual_seed(1)
        mesh = init_device_mesh("cuda", (1,))
        models.append(sw.fully_shard(Mlp().to(f"cuda:{index}"), mesh=mesh, transport="c10d"))
    expected = gradients(plain, "cpu")
    for index, model in enumerate(models):
        torch.cuda.set_device(index)
        found = gradients(model, f"cuda:{index}")
        assert {p.device.index for p in model.parameters()} == {index}
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_two_models_on_two_devices_of_one_process() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    run_on("cuda", 1, two_models)
