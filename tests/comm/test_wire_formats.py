"""Wire formats by themselves: bounds of what rounding adds, for every element; nan and inf stay in
sight; bytes are those that layouts plan with; feedback makes sums over steps exact.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from shardwise.comm.wires import format as formats
from shardwise.comm.wires import steps
from shardwise.comm.wires.format import add_up, decode, encode, encode_with_rest
from shardwise.comm.wires.gather import gather
from shardwise.comm.wires.reduce import Feedback, Result, all_reduce, reduce
from shardwise.comm.wires.steps import Buffers, Chunks
from shardwise.layout import Format, Wire, strategy_named

INT8 = Format("int8", 16)
FORMS = st.sampled_from([Format("bf16"), INT8, Format("int8", 128)])
MOST = 2.0**127  # bfloat16 has room for a little less than twice that
FLOATS = st.one_of(
    st.floats(-MOST, MOST, width=32),
    st.floats(-(2.0**-122), 2.0**-122, width=32),  # subnormal ones too
    st.just(0.0),
)
ROWS = st.integers(1, 3).flatmap(
    lambda rows: st.integers(0, 70).flatmap(
        lambda numel: st.lists(
            st.lists(FLOATS, min_size=numel, max_size=numel), min_size=rows, max_size=rows
        )
    )
)


def coded(form: Format, rows: torch.Tensor) -> torch.Tensor:
    num_bytes = form.num_bytes(rows.shape[1], rows.itemsize)
    found = torch.full((rows.shape[0], num_bytes), 0xA5, dtype=torch.uint8)
    encode(form, rows, found)
    return found


def decoded(form: Format, rows: torch.Tensor) -> torch.Tensor:
    found = torch.full_like(rows, 7.0)
    decode(form, coded(form, rows), found)
    return found


def summed(form: Format, rows: torch.Tensor) -> torch.Tensor:
    found = torch.full((rows.shape[1],), 7.0)
    add_up(form, coded(form, rows), found)
    return found


def bound(form: Format, row: torch.Tensor) -> torch.Tensor:
    """As `comm.wires.format` promises it, in float64."""
    row = row.double().abs()
    if form.name == "bf16":
        return row * 2.0**-8 + 2.0**-134
    found = torch.zeros_like(row)
    for at in range(0, row.numel(), form.block):
        part = row[at : at + form.block]
        found[at : at + form.block] = max(part.max().item() / 254 * (1 + 2.0**-20), 2.0**-127)
    return found


@given(FORMS, ROWS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_element_is_within_its_bound(
    form: Format, values: list[list[float]], dtype: torch.dtype
) -> None:
    rows = torch.tensor(values, dtype=torch.float32).to(dtype)
    found = torch.full(rows.shape, 7.0)
    decode(form, coded(form, rows), found)
    for row, back in zip(rows, found, strict=True):
        assert ((back.double() - row.double()).abs() <= bound(form, row)).all()
        assert (back[row == 0] == 0).all()


@given(FORMS, ROWS)
def test_sums_are_within_the_sum_of_bounds(form: Format, values: list[list[float]]) -> None:
    rows = torch.tensor(values) / 4  # so that sums of three have room
    found = summed(form, rows)
    bounds = sum(bound(form, row) for row in rows)
    # Additions of float32 round too: each at most 2^-24 of the largest sum on the way.
    adding = rows.double().abs().sum(0) * len(rows) * 2.0**-23 + 2.0**-140
    assert ((found.double() - rows.double().sum(0)).abs() <= bounds + adding).all()


@given(FORMS, ROWS, st.integers(1, 9))
def test_a_mean_is_rounded_once_whatever_the_number_of_ranks(
    form: Format, values: list[list[float]], world: int
) -> None:
    """Ranks with equal gradients: no more is lost than by one of them alone."""
    row = torch.tensor(values)[:1] / 16
    found = torch.full((row.shape[1],), 7.0)
    add_up(form, coded(form, row.repeat(world, 1)), found, 1 / world)
    torch.testing.assert_close(found, decoded(form, row)[0], rtol=1e-6, atol=1e-44)


@given(FORMS, ROWS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 10**6))
def test_what_is_not_finite_stays_so(
    form: Format, values: list[list[float]], bad: float, at: int
) -> None:
    rows = torch.tensor(values)
    if not rows.numel():
        return
    at %= rows.shape[1]
    rows[0, at] = bad
    found = decoded(form, rows)
    assert not found[0, at].isfinite()
    if form.name == "int8":
        block = slice(at - at % form.block, at - at % form.block + form.block)
        assert found[0, block].isnan().all()
        scales = coded(form, rows)[0, : 4 * (at // form.block + 1)].view(torch.float32)
        assert scales[-1].isnan(), "whatever a nan is as a code"
        found[0, block] = 0
        assert found.isfinite().all(), "other blocks are left alone"
    assert not summed(form, rows)[at].isfinite()


@given(st.integers(0, 5000), st.integers(1, 4000), st.integers(1, 3))
def test_cutting_adds_no_bytes(numel: int, segment: int, num_counts: int) -> None:
    for form in (Format("int8", 48), Format("bf16")):
        with segments_of(segment):
            cuts = steps.cut(numel + 99, form, torch.empty(0))  # others have more
            sizes = steps.piece_sizes(form, 4, numel, num_counts, cuts)
        assert sum(sizes) == form.num_bytes(numel, 4, num_counts)


@given(FORMS, ROWS)
def test_bits_depend_on_a_row_alone(form: Format, values: list[list[float]]) -> None:
    """Not on the slices in which it is worked on either."""
    rows = torch.tensor(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "SLICE", 20)
        together = decoded(form, rows)
    for row, expected in zip(rows, together, strict=True):
        apart = torch.full((1, row.numel() + 5), 3.0)[:, : row.numel()]  # strided otherwise
        apart.copy_(row)
        assert torch.equal(decoded(form, apart)[0], expected)


def test_codes_are_exact_where_values_are_multiples_of_the_scale() -> None:
    codes = torch.arange(-127, 128, dtype=torch.float32)
    rows = (codes * 0.5).expand(1, -1).contiguous()
    assert torch.equal(decoded(Format("int8", 256), rows), rows)


# -- movements, among ranks that are generators in one process ------------------------------------
SEGMENTS = st.sampled_from([1, steps.SEGMENT])  # 1: four blocks


@contextlib.contextmanager
def segments_of(numel: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "SEGMENT", numel)
        yield


class Together:
    """Moves bytes among generators that are run in turns: each issues until it waits, and no byte
    comes before all wait for it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]
        self.num_delivered = 0

    def run(self, movings: list[Any]) -> None:
        while any(waits := [next(moving, None) for moving in movings]):
            assert len(set(waits)) == 1, "all wait for the same"
            while self.num_delivered < waits[0]:
                self.deliver(*(posts[self.num_delivered] for posts in self.posted))

    def deliver(self, *posts: tuple[Any, ...]) -> None:
        self.num_delivered += 1
        for rank, (kind, out, *rest) in enumerate(posts):
            if kind == "gather":
                out.copy_(torch.cat([post[2] for post in posts]))
            else:
                pieces = [post[2].split(post[4])[rank] for post in posts]
                assert [p.numel() for p in pieces] == rest[1]
                out.copy_(torch.cat(pieces))


class Place:
    """A rank among them."""

    def __init__(self, all_: Together, rank: int) -> None:
        self.posts, self.rank, self.size = all_.posted[rank], rank, all_.size
        self.buffers = Buffers()

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> int:
        return self.post("gather", out.fill_(0xA5), part)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> int:
        return self.post("exchange", out.fill_(0xA5), sent, out_sizes, in_sizes)

    def post(self, *what: Any) -> int:
        self.posts.append(what)
        return len(self.posts)


SIZES = st.one_of(
    st.lists(st.integers(0, 200), min_size=2, max_size=4),
    st.tuples(st.integers(0, 200), st.integers(2, 4)).map(lambda both: [both[0]] * both[1]),
)


@given(FORMS, SIZES, SEGMENTS, st.integers(0, 99))
def test_all_ranks_gather_the_same_bits(
    form: Format, sizes: list[int], segment: int, seed: int
) -> None:
    """Parts of any sizes, empty ones too; the owner's part is rounded like everybody's."""
    generator = torch.Generator().manual_seed(seed)
    starts = (0, *itertools.accumulate(sizes))
    parts = [torch.randn(numel, generator=generator) for numel in sizes]
    ranks = Together(len(sizes))
    outs = [torch.full((starts[-1],), 7.0) for _ in sizes]
    with segments_of(segment):
        ranks.run(
            [
                gather(Place(ranks, r), form, part, out, Chunks(starts))
                for r, (part, out) in enumerate(zip(parts, outs, strict=True))
            ]
        )
    for out in outs:
        assert torch.equal(out, outs[0])
    for r, part in enumerate(parts):
        assert torch.equal(outs[0][starts[r] : starts[r + 1]], decoded(form, part[None])[0])


@given(FORMS, SIZES, SEGMENTS, st.booleans(), st.integers(0, 99))
def test_owners_get_the_sum_of_what_was_rounded(
    form: Format, sizes: list[int], segment: int, feeds: bool, seed: int
) -> None:
    """In the order of ranks, whoever owns it: the sum depends on no rank's place in a ring."""
    world, num_counts = len(sizes), 2
    generator = torch.Generator().manual_seed(seed)
    starts = (0, *itertools.accumulate(s + num_counts for s in sizes))
    packed = [torch.randn(starts[-1], generator=generator) for _ in sizes]
    for r, start in enumerate(starts[1:]):
        for each in packed:
            each[start - 2], each[start - 1] = 1.0, 0.0
        packed[0][start - 1] = float(r % 2)
    ranks = Together(world)
    results = [Result(torch.empty(numel), torch.empty(num_counts), 0.5) for numel in sizes]
    rests = [Feedback() if feeds else None for _ in sizes]  # which is empty the first time
    with segments_of(segment):
        ranks.run(
            [
                reduce(
                    Place(ranks, r),
                    form,
                    packed[r],
                    Chunks(starts),
                    num_counts,
                    results[r],
                    rests[r],
                )
                for r in range(world)
            ]
        )
    for r, numel in enumerate(sizes):
        rows = torch.stack([each[starts[r] : starts[r] + numel] for each in packed])
        assert torch.equal(results[r].data, summed(form, rows) * 0.5)
        assert results[r].counts.tolist() == [world, float(r % 2)]


@given(FORMS, st.integers(2, 4), st.integers(0, 700), SEGMENTS, st.integers(0, 99))
def test_an_all_reduce_gives_all_the_same_bits(
    form: Format, world: int, data: int, segment: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_ = [torch.randn(data + 1, generator=generator) for _ in range(world)]
    for each in given_:
        each[-1] = 1.0
    size = -(-data // (world * 16)) * 16
    starts = [min(r * size, data) for r in range(world + 1)]
    parts = tuple(starts[r + 1] - starts[r] for r in range(world))
    outs = [each.clone() for each in given_]
    ranks = Together(world)
    with segments_of(segment):
        ranks.run([all_reduce(Place(ranks, r), form, outs[r], parts, 1) for r in range(world)])
    for out in outs:
        assert torch.equal(out, outs[0]) and out[-1] == world
    for start, numel in zip(starts, parts, strict=False):
        rows = torch.stack([each[start : start + numel] for each in given_])
        assert torch.equal(
            outs[0][start : start + numel], decoded(form, summed(form, rows)[None])[0]
        )


def test_feedback_makes_sums_over_steps_exact() -> None:
    """What 200 steps have sent differs from what they had by one step's rounding, where without
    feedback the error of equal gradients adds up.
    """
    torch.manual_seed(0)
    form, num_steps = INT8, 200
    gradient = torch.randn(1, 64)
    sent, plain = torch.zeros(1, 64), torch.zeros(1, 64)
    feedback, buffer = Feedback(), coded(form, gradient)
    for _ in range(num_steps):
        encode_with_rest(form, gradient, feedback.rest("here", gradient), buffer)
        back = torch.empty_like(gradient)
        decode(form, buffer, back)
        sent += back
        plain += decoded(form, gradient)
    exact = gradient.double() * num_steps
    error = (sent.double() - exact).abs()
    once = gradient.abs().max().item() / 254
    assert error.max() < 1.1 * once + 1e-3, "one rounding, and float32 sums of 200 steps"
    without = (plain.double() - exact).abs()
    assert without.max() > 50 * once
    assert error.mean() < 0.05 * without.mean()


def test_feedback_forgets_a_step_that_is_not_finite() -> None:
    feedback, rows = Feedback(), torch.ones(1, 32)
    rows[0, 3] = math.inf
    buffer = coded(INT8, rows)
    encode_with_rest(INT8, rows, feedback.rest("here", rows), buffer)
    back = torch.empty(1, 32)
    decode(INT8, buffer, back)
    assert back[0, :16].isnan().all() and back[0, 16:].isfinite().all()
    encode_with_rest(INT8, torch.ones(1, 32), feedback.rest("here", rows), buffer)
    decode(INT8, buffer, back)
    assert torch.allclose(back, torch.ones(1, 32), rtol=0.01)


@pytest.mark.parametrize(
    ("settings", "strategy", "text"),
    [
        ({"gather": "int4"}, "full_shard", "Wire.gather: 'int4' is none of exact, bf16, int8"),
        ({"reduce": 8}, "full_shard", "Wire.reduce: 8 is none of"),
        ({"axis": "x"}, "full_shard", "Wire.axis: 'x' is none of"),
        ({"reduce": "int8", "block": 100}, "full_shard", "Wire.block: 100 is no multiple of 16"),
        ({"block": 64.0}, "full_shard", "Wire.block: expected a number"),
        ({"error_feedback": True}, "full_shard", "nothing is lost with reduce='exact'"),
        ({"reduce": "int8", "axis": "both"}, "full_shard", "has no replicate axis"),
        ({"reduce": "int8", "axis": "shard"}, "no_shard", "has no shard axis"),
        ({"gather": "int8"}, "no_shard", "gathers nothing"),
        ({"gather": "int8", "axis": "replicate"}, "hybrid_shard", "over its shard axis only"),
        ({"host_ranks": 2}, "hybrid_shard", "has an axis inside hosts and one between them"),
        ({"host_ranks": 3}, "full_shard", "is no factor of the 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    settings: dict[str, Any], strategy: str, text: str
) -> None:
    with pytest.raises(ValueError, match=r"Wire\.\w+") as caught:
        Wire(**settings).check(strategy_named(strategy), 4, 2)
    assert text in str(caught.value) and "\n" not in str(caught.value)
