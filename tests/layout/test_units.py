"""Units, strategies and policies: values with names, sums and errors."""

import dataclasses

import pytest
import torch
from torch.distributed import fsdp

from shardwise.layout import (
    STRATEGIES,
    CPUOffloadPolicy,
    Lifetime,
    MixedPrecisionPolicy,
    Moment,
    ParamSpec,
    Strategy,
    UnitLayout,
    layout_unit,
    strategy_named,
)

F32, BF16 = torch.float32, torch.bfloat16


def unit_of(strategy: str, world: int = 4, replicas: int = 1, **policy: torch.dtype) -> UnitLayout:
    specs = [
        ParamSpec("w", (64, 16), F32),
        ParamSpec("frozen", (64,), F32, requires_grad=False),
        ParamSpec("b", (7,), F32),
        ParamSpec("half", (32,), BF16),
    ]
    return layout_unit(
        "layers.0",
        specs,
        strategy=strategy_named(strategy),
        policy=MixedPrecisionPolicy(**policy),
        world=world,
        replicas=replicas,
    )


def test_parameters_are_grouped_by_dtype() -> None:
    names = [[p.name for p in b.params] for b in unit_of("full_shard").buckets]
    assert names == [["w", "frozen", "b"], ["half"]]
    buckets = unit_of("full_shard", param_dtype=BF16, reduce_dtype=F32).buckets
    assert [(b.dtype, b.gather_dtype, b.reduce_dtype) for b in buckets] == [
        (F32, BF16, F32),
        (BF16, BF16, F32),
    ]


def test_bytes_are_the_sums_over_buckets() -> None:
    unit = unit_of("full_shard", param_dtype=BF16)
    shards = [torch.empty(b.chunk_numel, dtype=b.dtype) for b in unit.buckets]
    full = [torch.empty(b.full_numel, dtype=b.gather_dtype) for b in unit.buckets]
    assert unit.shard_bytes == sum(t.nbytes for t in shards)
    assert unit.full_bytes == sum(t.nbytes for t in full)
    assert unit.grad_bytes == (16 * 16 + 2) * 4 + 8 * 2  # rank 0 owns most: w, b; half
    assert unit_of("no_shard", world=1).full_bytes == 0


def test_collectives_of_a_step() -> None:
    def moments(unit: UnitLayout, **how: bool) -> list[tuple[str, Moment]]:
        return [(c.kind, c.moment) for c in unit.collectives(**how)]

    gather, backward = ("gather", Moment.FORWARD), ("gather", Moment.BACKWARD)
    reduce = ("reduce", Moment.POST_BACKWARD)
    full = unit_of("full_shard")
    assert moments(full) == [gather, backward, gather, backward, reduce, reduce]
    assert moments(full, root=True) == [gather, gather, reduce, reduce]
    assert moments(full, sync=False) == [gather, backward, gather, backward]
    assert moments(unit_of("shard_grad_op")) == [gather, gather, reduce, reduce]
    kinds = [c.kind for c in unit_of("hybrid_shard", replicas=2).collectives()]
    assert kinds == ["gather"] * 4 + ["reduce", "all_reduce"] * 2
    split = unit_of("hybrid_full_optimizer", replicas=2)
    kinds = [f"{c.kind} {c.axis}" for c in split.collectives()]
    assert kinds == ["gather shard"] * 4 + ["reduce shard", "reduce replicate"] * 2
    assert [f"{c.kind} {c.axis}" for c in split.refreshes] == ["gather replicate"] * 2
    assert unit_of("hybrid_shard", replicas=2).refreshes == ()
    assert unit_of("hybrid_full_optimizer").refreshes == ()
    assert [c.kind for c in unit_of("no_shard", world=1, replicas=2).collectives()] == [
        "all_reduce",
        "all_reduce",
    ]
    assert unit_of("full_shard", world=1).collectives() == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, name) for name in STRATEGIES),
        ("ZeRO-1", "shard_optimizer"),
        ("zero2", "shard_grad_op"),
        ("zero_3", "full_shard"),
        ("HSDP", "hybrid_shard"),
        ("ddp", "no_shard"),
        ("HFSDP", "hybrid_full_optimizer"),
        ("full-shard", "full_shard"),
    ],
)
def test_strategies_have_names_and_aliases(name: str, expected: str) -> None:
    assert strategy_named(name).name == expected


def test_strategies_pass_through_and_unknown_names_are_refused() -> None:
    kept = strategy_named("full_shard").with_lifetime(Lifetime.PASS)
    assert isinstance(kept, Strategy)
    assert strategy_named(kept) is kept
    with pytest.raises(ValueError, match="unknown strategy 'fulshard'"):
        strategy_named("fulshard")


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy, CPUOffloadPolicy])
def test_policies_have_the_fields_and_defaults_of_torch(policy: type) -> None:
    def fields(cls: type) -> list[tuple[str, object]]:
        return [(f.name, f.default) for f in dataclasses.fields(cls)]

    assert fields(policy) == fields(getattr(fsdp, policy.__name__))


def test_dtypes_of_a_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    assert policy.gather_dtype(F32) == policy.sum_dtype(BF16) == BF16
    assert policy.gather_dtype(torch.int32) == torch.int32
    assert MixedPrecisionPolicy(reduce_dtype=F32).sum_dtype(BF16) == F32
    with pytest.raises(ValueError, match=r"param_dtype: torch.int8 is no floating dtype"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"reduce_dtype: expected a torch.dtype, found 'bf16'"):
        MixedPrecisionPolicy(reduce_dtype="bf16")  # type: ignore[arg-type]
