"""The c10d transport against plain tensors: what it delivers, and exactly what it issues."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from axes import alone, hybrid_axes, shard_axis
from torch.distributed.tensor.debug import CommDebugMode

import shardwise.layout.bucket as bucket_module
from layouts import fill_shard, gathered, random_bucket, random_whole, rows_of
from ranks import on_ranks
from shardwise.comm.c10d.in_place import GradsInPlace
from shardwise.comm.c10d.packed_grads import ReducePlan
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.transport import Bucket, Position, Transport
from shardwise.errors import TransportError
from shardwise.layout import (
    BucketLayout,
    Cuts,
    ParamSpec,
    ReduceLayout,
    layout_bucket,
    layout_reduce,
)

CPU = torch.device("cpu")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TRIALS = 40


def transport_of(rank: int, world: int) -> C10dTransport:
    return C10dTransport(shard_axis(rank, world), alone("replicate", rank))


def layout_of(*specs: ParamSpec, world: int, gather: torch.dtype = F32, reduce: torch.dtype = F32):
    return layout_bucket(specs, gather_dtype=gather, reduce_dtype=reduce, world=world)


@contextmanager
def small_padding(num_bytes: int) -> Iterator[None]:
    """Let small test buckets be moved as large ones would be."""
    before = bucket_module.SMALL_PADDING_BYTES
    bucket_module.SMALL_PADDING_BYTES = num_bytes
    try:
        yield
    finally:
        bucket_module.SMALL_PADDING_BYTES = before


@contextmanager
def issued() -> Iterator[list[tuple[str, int]]]:
    """Names and element counts of the calls inside: torch.distributed's attributes replaced."""
    calls: list[tuple[str, int]] = []
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "reduce")
    original = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counted(name: str):
        def call(*args, **kwargs):
            calls.append((name, max(arg.numel() for arg in args if torch.is_tensor(arg))))
            return original[name](*args, **kwargs)

        return call

    for name in original:
        setattr(dist, name, counted(name))
    try:
        yield calls
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


def gather(transport: C10dTransport, bucket: Bucket, shard: torch.Tensor | None = None):
    """Gathered parameters; whatever was not written shows as 77."""
    layout = bucket.layout
    out = torch.full((layout.full_numel,), 77.0).to(layout.gather_dtype)
    handle = transport.gather(bucket, bucket.buffer if shard is None else shard, out)
    handle.wait()
    handle.wait()
    return gathered(out, layout)


@on_ranks(1, 2, 3, 4)
def test_gathers_of_random_buckets(rank: int, world: int) -> None:
    transport, rng = transport_of(rank, world), random.Random(7)
    stored = (F32, BF16, F16, torch.float8_e4m3fn, torch.int16, torch.bool)
    for trial in range(TRIALS):
        dtype = rng.choice(stored)
        cast = rng.choice((None, F32, BF16)) if dtype.is_floating_point else None
        layout = random_bucket(rng, world, dtype=dtype, gather_dtype=cast)
        bucket = transport.attach(f"unit[{trial}]", layout, CPU)
        whole = random_whole(layout, trial)
        fill_shard(bucket.buffer, layout, whole, rank)
        with small_padding(0 if trial % 2 else 2**20):
            for expected, found in zip(whole, gather(transport, bucket), strict=True):
                assert torch.equal(expected.to(layout.gather_dtype), found)


def exchange(
    transport: C10dTransport,
    bucket: Bucket,
    reduce: ReduceLayout,
    grads: list[torch.Tensor | None],
    scale: float = 1.0,
    pre_scale: float = 1.0,
) -> torch.Tensor:
    """One reduction of this rank's gradients (None: never arrived); returns `out`."""
    out = torch.full((reduce.chunk_numel,), 77.0, dtype=reduce.dtype)
    buffer = transport.grad_buffer(bucket, reduce, out, pre_scale)
    order = list(range(len(grads)))
    random.Random(transport._shard.rank).shuffle(order)
    for index in order:
        assert not buffer.had[index]
        if grads[index] is not None:
            buffer.put(index, grads[index])
            assert buffer.had[index]
    handle = transport.reduce(bucket, buffer, out, scale)
    handle.wait()
    handle.wait()
    assert not out.requires_grad, "reductions are no part of anybody's graph"
    return out


def laid_out(grad: torch.Tensor, how: int) -> torch.Tensor:
    """The same values with other strides, or with a graph behind them."""
    if how == 1 and grad.dim() > 1:
        return grad.transpose(0, -1).contiguous().transpose(0, -1)
    if how == 2:
        return torch.cat([grad.reshape(-1), grad.reshape(-1)])[grad.numel() :].view(grad.shape)
    return grad.clone().requires_grad_(how == 3)


def assert_reduced(
    out: torch.Tensor,
    reduce: ReduceLayout,
    rank: int,
    grads: list[list[torch.Tensor | None]],
    scale: float,
) -> None:
    """`out` holds this rank's rows of the scaled sum, zeros as padding, and the counts."""
    at = 0
    for i, (param, start) in enumerate(zip(reduce.params, reduce.offsets(rank), strict=True)):
        total = sum((g[i] for g in grads if g[i] is not None), torch.zeros(param.spec.shape))
        stop = start + param.shard_numel(rank)
        expected = rows_of(total * scale, param, rank).reshape(-1).to(out.dtype)
        assert torch.equal(out[start:stop], expected)
        had = sum(g[i] is not None for g in grads)
        assert out[reduce.counts_offset + i].item() == had * scale
        at = stop
    assert not out[at : reduce.counts_offset].any(), "padding must not carry garbage"


@on_ranks(1, 2, 3, 4)
def test_reductions_of_random_buckets(rank: int, world: int) -> None:
    """Small integers: sums are exact in any order and dtype, so results are compared bit by bit."""
    transport, rng = transport_of(rank, world), random.Random(11)
    for trial in range(TRIALS):
        layout = random_bucket(rng, world, reduce_dtype=rng.choice((F32, F32, BF16, F16)))
        bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
        grads = [
            [
                random_whole(layout, 1000 * trial + r)[i] if rng.random() < 0.7 else None
                for i in reduce.indices
            ]
            for r in range(world)
        ]
        mine = [None if g is None else laid_out(g, (trial + rank) % 4) for g in grads[rank]]
        with small_padding(0 if trial % 2 else 2**20):
            out = exchange(transport, bucket, reduce, mine, scale=0.5)
        assert_reduced(out, reduce, rank, grads, 0.5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@on_ranks(2, 3, 4)
def test_gloo_reduce_scatters_by_all_reduce(rank: int, world: int, dtype: torch.dtype) -> None:
    """What summing in place relies on; a Gloo with a reduce-scatter of its own would fail here."""
    torch.manual_seed(rank)
    numel = 5000 * world
    grads = (torch.randn(numel) * torch.randn(numel).mul(4).exp()).to(dtype)
    part = torch.empty(5000, dtype=dtype)
    dist.reduce_scatter_tensor(part, grads.clone())
    dist.all_reduce(grads)
    assert torch.equal(part, grads.chunk(world)[rank])


@on_ranks(2, 4)
def test_sums_in_place_unless_watched_and_both_kinds_pair(rank: int, world: int) -> None:
    layout = layout_of(ParamSpec("w", (512 * world, 3), F32), world=world)
    reduce = layout_reduce(layout)
    transport = transport_of(rank, world)
    bucket = transport.attach("unit[0]", layout, CPU)
    torch.manual_seed(rank)
    grads = [torch.randn(512 * world, 3)]

    def total() -> torch.Tensor:
        out = torch.empty(reduce.chunk_numel)
        buffer = transport.grad_buffer(bucket, reduce, out)
        for index, grad in enumerate(grads):
            buffer.put(index, grad)
        transport.reduce(bucket, buffer, out, 0.5).wait()
        return out

    alone = total()
    assert transport._sums_by_gloo
    with CommDebugMode() as everywhere:
        watched = total()
    assert sum(everywhere.get_comm_counts().values()) == 1
    assert any("reduce_scatter" in str(op) for op in everywhere.get_comm_counts())
    if rank == 0:
        with CommDebugMode() as mixed:
            half = total()
        assert any("reduce_scatter" in str(op) for op in mixed.get_comm_counts())
    else:
        half = total()
    assert torch.equal(alone, watched) and torch.equal(alone, half)


@on_ranks(2)
def test_fp32_sums_of_two_ranks_are_bit_equal(rank: int, world: int) -> None:
    spec, owned = (
        ParamSpec("w", (37, 5), F32),
        ParamSpec("m", (6, 6), F32, cuts=Cuts.whole(6, 2, 1)),
    )
    layout = layout_of(spec, owned, world=world)
    transport = transport_of(rank, world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    grads = [
        [
            torch.randn(p.spec.shape, generator=torch.Generator().manual_seed(r))
            for p in layout.params
        ]
        for r in range(world)
    ]
    assert_reduced_data(exchange(transport, bucket, reduce, grads[rank], 0.5), reduce, rank, grads)


def assert_reduced_data(out, reduce, rank, grads) -> None:
    for i, (param, at) in enumerate(zip(reduce.params, reduce.offsets(rank), strict=True)):
        expected = rows_of((grads[0][i] + grads[1][i]) * 0.5, param, rank).reshape(-1)
        assert torch.equal(out[at : at + expected.numel()], expected)


@on_ranks(2)
def test_a_second_arrival_adds(rank: int, world: int) -> None:
    layout = layout_of(ParamSpec("w", (5, 3), F32), ParamSpec("never", (4,), F32), world=world)
    transport = transport_of(rank, world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    out = torch.empty(reduce.chunk_numel)
    buffer = transport.grad_buffer(bucket, reduce, out, 0.25)
    buffer.put(0, torch.full((5, 3), 4.0))
    buffer.put(0, torch.full((3, 5), 8.0).t())
    transport.reduce(bucket, buffer, out, 1.0).wait()
    mine = layout.params[0].shard_numel(rank)
    assert out[:mine].tolist() == [6.0] * mine
    assert out[reduce.counts_offset :].tolist() == [2.0, 0.0]


@on_ranks(2)
def test_fp16_is_scaled_before_it_is_cast(rank: int, world: int) -> None:
    layout = layout_of(ParamSpec("w", (4,), F32), world=world, reduce=F16)
    transport = transport_of(rank, world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    out = exchange(transport, bucket, reduce, [torch.full((4,), 2.0**17)], pre_scale=0.125)
    assert out[:2].tolist() == [2.0**15, 2.0**15]


@on_ranks(2)
def test_several_movements_in_flight(rank: int, world: int) -> None:
    """Prefetch: gathers are waited for later, and in another order."""
    transport = transport_of(rank, world)
    layout = layout_of(ParamSpec("w", (31, 7), F32), ParamSpec("b", (7,), F32), world=world)
    moves = []
    for n in range(4):
        bucket, whole = transport.attach(f"unit[{n}]", layout, CPU), random_whole(layout, n)
        fill_shard(bucket.buffer, layout, whole, rank)
        out = torch.empty(layout.full_numel)
        moves.append((transport.gather(bucket, bucket.buffer, out), out, whole))
    for handle, out, whole in reversed(moves):
        handle.wait()
        assert all(torch.equal(a, b) for a, b in zip(gathered(out, layout), whole, strict=True))


@on_ranks(2, 4)
def test_number_and_size_of_collectives_is_exact(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(
        ParamSpec("w", (8, 16), F32),
        ParamSpec("frozen", (1000,), F32, requires_grad=False),
        ParamSpec("b", (3,), F32),
        world=world,
    )
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    with issued() as calls, CommDebugMode() as debug:
        gather(transport, bucket)
        exchange(transport, bucket, reduce, [torch.ones(8, 16), None])
    rows = -(-3 // world)
    chunk = -(-(8 * 16 // world + rows + 2) // 4) * 4  # frozen parameters cost nothing; 16 bytes
    assert calls == [
        ("all_gather_single", world * layout.chunk_numel),
        ("reduce_scatter_single", world * chunk),
    ]
    assert debug.get_total_counts() == 2


@on_ranks(4)
def test_parts_of_one_owner_are_sent_by_it_alone(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(
        *(ParamSpec(f"m{i}", (16, 16), F32, cuts=Cuts.whole(16, world, 2)) for i in range(3)),
        ParamSpec("late", (32,), F32, cuts=Cuts.whole(32, world, 3)),
        world=world,
    )
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    with small_padding(0), issued() as calls:
        gather(transport, bucket)
        exchange(transport, bucket, reduce, [torch.ones(p.spec.shape) for p in layout.params])
    assert calls == [
        ("broadcast", 768),
        ("broadcast", 32),
        ("reduce", 4),  # counts only: every rank knows which gradients exist
        ("reduce", 4),
        ("reduce", 772),
        ("reduce", 36),
    ]


@on_ranks(2)
def test_nothing_is_issued_for_frozen_buckets(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(ParamSpec("w", (8,), F32, requires_grad=False), world=world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    with issued() as calls:
        assert exchange(transport, bucket, reduce, []).numel() == 0
    assert calls == []
    unfrozen = layout_reduce(layout, (True,))
    out = exchange(transport, bucket, unfrozen, [torch.ones(8)])
    assert out.tolist() == [2.0] * 4 + [0.0] * 3 + [2.0], "the plan follows the reduce layout"


@on_ranks(2)
def test_axes_of_size_one_issue_nothing(rank: int, world: int) -> None:
    transport = C10dTransport(alone("shard", rank), alone("replicate", rank))
    layout = layout_of(ParamSpec("w", (5, 3), F32), ParamSpec("s", (), F32), world=1, gather=BF16)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    whole = random_whole(layout, 0)
    fill_shard(bucket.buffer, layout, whole, 0)
    with issued() as calls:
        for expected, found in zip(whole, gather(transport, bucket), strict=True):
            assert torch.equal(expected.to(BF16), found)
        out = exchange(transport, bucket, reduce, [torch.full((5, 3), 3.0), None], scale=0.5)
        transport.all_reduce(bucket, out).wait()
        assert out.tolist() == [1.5] * 15 + [0.0] + [0.0, 0.0] + [0.5, 0.0]
        assert transport.agree([True, False]) == [True, False]
    assert calls == []


@on_ranks(2)
def test_no_copy_when_the_shard_is_the_whole(rank: int, world: int) -> None:
    transport = C10dTransport(alone("shard", rank), alone("replicate", rank))
    layout = layout_of(ParamSpec("w", (16,), F32), world=1)
    bucket = transport.attach("unit[0]", layout, CPU)
    version = bucket.buffer._version
    transport.gather(bucket, bucket.buffer, bucket.buffer[: layout.full_numel]).wait()
    assert bucket.buffer._version == version


@on_ranks(4)
def test_hybrid_mesh_reduces_over_both_axes(rank: int, world: int) -> None:
    shard, replicate = hybrid_axes(rank, 2, 2)
    transport = C10dTransport(shard, replicate)
    layout = layout_of(ParamSpec("w", (5, 3), F32), ParamSpec("b", (4,), F32), world=2)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    whole = random_whole(layout, 5)
    fill_shard(bucket.buffer, layout, whole, shard.rank)
    assert all(torch.equal(a, b) for a, b in zip(gather(transport, bucket), whole, strict=True))
    grads = [[torch.full((5, 3), 2.0**r), None if r else torch.ones(4)] for r in range(world)]
    with issued() as calls:
        out = exchange(transport, bucket, reduce, grads[rank], scale=0.25)
        transport.all_reduce(bucket, out).wait()
    assert_reduced(out, reduce, shard.rank, grads, 0.25)
    assert [name for name, _ in calls] == ["reduce_scatter_single", "all_reduce"]
    assert transport.agree([rank == 3, False, True]) == [True, False, True]


@on_ranks(3)
def test_ranks_agree_on_flags(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    assert isinstance(transport, Transport)
    assert transport.agree([]) == []
    assert transport.agree([False, rank == 1, rank != 1, False]) == [False, True, True, False]


@on_ranks(2)
def test_no_warnings(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(ParamSpec("w", (6, 3), F32), world=world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather(transport, bucket)
        exchange(transport, bucket, reduce, [torch.ones(6, 3)])


@on_ranks(2)
def test_older_names_serve_older_torch(rank: int, world: int) -> None:
    names = ("all_gather_single", "reduce_scatter_single")
    originals = {n: getattr(dist, n) for n in names if hasattr(dist, n)}
    for name in originals:
        delattr(dist, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            transport = transport_of(rank, world)
            layout = layout_of(ParamSpec("w", (6, 3), F32), world=world)
            bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
            whole = random_whole(layout, 3)
            fill_shard(bucket.buffer, layout, whole, rank)
            assert torch.equal(gather(transport, bucket)[0], whole[0])
            out = exchange(transport, bucket, reduce, [torch.ones(6, 3)])
            assert out.tolist() == [2.0] * 9 + [0.0] * 2 + [2.0]
    finally:  # the rank goes on with other tests
        for name, original in originals.items():
            setattr(dist, name, original)


@on_ranks(2)
def test_an_abandoned_buffer_cannot_be_reduced(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(ParamSpec("w", (6,), F32), world=world)
    bucket, reduce = transport.attach("unit[0]", layout, CPU), layout_reduce(layout)
    out = torch.empty(reduce.chunk_numel)
    buffer = transport.grad_buffer(bucket, reduce, out)
    buffer.put(0, torch.ones(6))
    buffer.discard()
    with pytest.raises(AssertionError, match="reduced once"):
        transport.reduce(bucket, buffer, out, 1.0)


@on_ranks(2)
def test_errors_say_where(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    with pytest.raises(ValueError, match=r"layers.0\[0\]: the layout is for 3 ranks"):
        transport.attach("layers.0[0]", layout_of(ParamSpec("w", (6,), F32), world=3), CPU)
    layout: BucketLayout = layout_of(ParamSpec("w", (64,), F32), world=world)
    bucket = transport.attach("layers.0[0]", layout, CPU)
    transport.enter(Position(5, "forward", "layers.0"))
    with pytest.raises(
        TransportError, match=r"all_gather of layers.0\[0\] failed .*pass 5, forward"
    ):
        transport.gather(bucket, bucket.buffer, torch.empty(layout.full_numel + 1))


@on_ranks(2)
def test_nothing_is_issued_for_empty_parameters(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    layout = layout_of(ParamSpec("w", (0, 4), F32, requires_grad=False), world=world)
    bucket = transport.attach("unit[0]", layout, CPU)
    with issued() as calls:
        assert gather(transport, bucket)[0].shape == (0, 4)
    assert calls == []


@on_ranks(2)
def test_all_of_a_sum_in_place_is_written(rank: int, world: int) -> None:
    """Replicas are sent its end too, up to where the counts lie."""
    specs = [ParamSpec("a", (4, 5), F32), ParamSpec("b", (2,), F32)]
    layout = layout_of(*specs, world=world)
    transport = transport_of(rank, world)
    bucket = transport.attach("unit", layout, CPU)
    reduced = layout_reduce(layout)
    assert reduced.largest_numel < reduced.counts_offset
    out = torch.full((reduced.chunk_numel,), float("nan"))
    grads = GradsInPlace(bucket, ReducePlan.of(bucket, reduced), out, 1.0)
    for index, spec in enumerate(specs):
        grads.put(index, torch.ones(spec.shape))
    transport.reduce(bucket, grads, out, 1.0).wait()
    assert out.isfinite().all()
    assert out[: reduced.largest_numel].eq(world).all() and out[reduced.counts_offset :].eq(2).all()
