"""Parameters with all-gather hooks: torch's `fully_shard` on the same subclass is the oracle.

`Scaled` is a weight in int8 with a scale per row, like the quantized subclasses of torchao; `Cast`
keeps fp32 and gathers bf16, with padding. Losses must be those of torch, bit for bit.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.utils._pytree as pytree
from engine_kit import TRANSPORTS, grid, line, local
from torch.testing._internal.two_tensor import TwoTensor

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes
from shardwise.errors import DivergenceError, EngineError

SEEN: list[Any] = []
aten = torch.ops.aten


class Wrapper(torch.Tensor):
    """A wrapper over inner tensors named in `parts`; operations that only move data go to each."""

    parts: tuple[str, ...] = ()

    @staticmethod
    def make(kind: Any, *inner: torch.Tensor, dtype: torch.dtype) -> Any:
        first = inner[0]
        self = torch.Tensor._make_wrapper_subclass(
            kind, first.size(), dtype=dtype, device=first.device
        )
        for key, tensor in zip(kind.parts, inner, strict=True):
            setattr(self, key, tensor)
        return self

    def __tensor_flatten__(self) -> Any:
        return list(self.parts), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls.make(cls, *(inner[k] for k in cls.parts), dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = pytree.tree_leaves(
            [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)]
        )[0].dtype
        outs = []
        for key in cls.parts:

            def pick(t: Any, key: str = key) -> Any:
                return getattr(t, key)

            a, k = pytree.tree_map_only(cls, pick, (args, kwargs))
            outs.append(func(*a, **cls.adapted(func, key, k)))
        if func is aten.copy_.default:
            return args[0]
        if isinstance(outs[0], (list, tuple)):
            return [cls.make(cls, *o, dtype=dtype) for o in zip(*outs, strict=True)]
        if not isinstance(outs[0], torch.Tensor):
            return outs[0]
        return cls.make(cls, *outs, dtype=dtype)

    @classmethod
    def adapted(cls, func: Any, key: str, kwargs: Any) -> Any:
        return kwargs


class Scaled(Wrapper):
    """int8 rows and their scales: two inputs of other dtypes and sizes; frozen."""

    parts = ("data_int8", "scale")

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        return cls.make(cls, (weight / scale).round().to(torch.int8), scale, dtype=weight.dtype)

    def __repr__(self, **_: Any) -> str:
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, w, *bias = args
            return torch.nn.functional.linear(x, _Dequantized.apply(w).to(x.dtype), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (aten.new_zeros.default, aten.as_strided.default):
            size = args[1]
            w = args[0]
            if func is aten.new_zeros.default:
                data, scale = w.data_int8.new_zeros(size), w.scale.new_zeros((size[0], 1))
            else:
                data = w.data_int8.as_strided(size, args[2], *args[3:])
                scale = w.scale.as_strided((size[0], 1), (1, 1), *args[3:])
            return cls.make(cls, data, scale, dtype=w.dtype)
        if func is aten.view.default:  # only ever flattened, by torch's own fully_shard
            w = args[0]
            return cls.make(cls, w.data_int8.view(args[1]), w.scale, dtype=w.dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        SEEN.append(
            (
                mesh.size(),
                mesh.ndim,
                tuple(outer_size),
                outer_stride,
                type(module).__name__,
                mp_policy.param_dtype,
            )
        )
        return (self.data_int8, self.scale), ("meta", self.shape[0])

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        data, scale = outputs
        assert metadata == ("meta", self.shape[0])
        if out is not None:
            assert data.data_ptr() == out.data_int8.data_ptr()
            return None
        return type(self).make(type(self), data, scale, dtype=param_dtype), (data, scale)


class _Dequantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Any) -> torch.Tensor:
        return w.data_int8 * w.scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class Cast(Wrapper):
    """Stored in fp32, gathered in bf16 and padded by itself; the full form is a plain tensor."""

    parts = ("values",)

    def __repr__(self, **_: Any) -> str:
        return f"Cast({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (
            aten.detach.default,
            aten.copy_.default,
            aten.new_zeros.default,
            aten.slice.Tensor,
            aten.clone.default,
            aten.empty_like.default,
            aten.view.default,
            aten.as_strided.default,
            aten._to_copy.default,
            aten.split.Tensor,
            aten.fill_.Scalar,
            aten.zeros_like.default,
        ):
            return super().__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Any:
        return cls.make(cls, weight.detach().clone(), dtype=weight.dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        sent = self.values.to(torch.bfloat16)
        padding = sent.new_zeros((rows - sent.shape[0], *outer_size[1:]))
        return (torch.cat([sent, padding]),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered.to(param_dtype)[: out.shape[0]])
            return None
        made = gathered.to(param_dtype)
        return made, (made,)


class Net(nn.Module):
    """Quantized frozen, cast trainable and plain parameters, in each of two blocks."""

    def __init__(self, rows: int = 8, kinds: tuple[str, ...] = ("scaled", "cast")) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6), nn.LayerNorm(6)) for _ in range(2)
        )
        for block in self.blocks:
            if "scaled" in kinds:
                block[0].weight = nn.Parameter(Scaled.of(block[0].weight.data), requires_grad=False)
            if "cast" in kinds:
                block[1].weight = nn.Parameter(Cast.of(block[1].weight.data))
                block[0].bias = nn.Parameter(Cast.of(block[0].bias.data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def twice(make: Any) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models[0], models[1]


def shard(fully_shard: Any, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def losses(model: nn.Module, rank: int, steps: int = 3, norm_bits: bool = False) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    out = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(3, 6)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_losses_are_those_of_torch(rank: int, world: int, transport: str, reshard: Any) -> None:
    ours, theirs = twice(Net)
    shard(torch_fsdp.fully_shard, theirs, mesh=line(world), reshard_after_forward=reshard)
    shard(
        sw.fully_shard, ours, mesh=line(world), transport=transport, reshard_after_forward=reshard
    )
    assert losses(ours, rank) == losses(theirs, rank)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert type(local(a)) is type(local(b)), name
        for x, y in zip(inner(local(a)), inner(local(b)), strict=True):
            assert torch.equal(x, y), name


def inner(t: torch.Tensor) -> list[torch.Tensor]:
    return [getattr(t, k) for k in t.parts] if isinstance(t, Wrapper) else [t]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(3)
def test_uneven_rows_with_hooks_that_pad(rank: int, world: int, transport: str) -> None:
    ours, theirs = twice(lambda: Net(7, ("cast",)))
    shard(torch_fsdp.fully_shard, theirs, mesh=line(world))
    shard(sw.fully_shard, ours, mesh=line(world), transport=transport)
    got, want = losses(ours, rank), losses(theirs, rank)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)  # Gloo's order of sums on 3 ranks
    assert got[0] == want[0]


@on_ranks(3)
def test_uneven_rows_without_padding_are_refused_on_every_rank(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = shard(sw.fully_shard, Net(7, ("scaled",)), mesh=line(world))
    kinds = AssertionError if rank == 2 else DivergenceError
    with pytest.raises(kinds, match=r"0\.weight: (unevenly sharded|fsdp_pre_all_gather gave)"):
        model(torch.ones(2, 6))


@on_ranks(2)
def test_mixed_precision_is_told_to_the_hooks(rank: int, world: int) -> None:
    ours, theirs = twice(Net)
    for fully_shard, policy, model in (
        (torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy, theirs),
        (sw.fully_shard, sw.MixedPrecisionPolicy, ours),
    ):
        bf16 = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(fully_shard, model, mesh=line(world), mp_policy=bf16)
    SEEN.clear()
    want = losses(theirs, rank)
    torch_saw = SEEN[:]
    SEEN.clear()
    assert losses(ours, rank) == want
    assert set(SEEN) == set(torch_saw) and len(SEEN) == len(torch_saw)
    assert SEEN[0] == (2, 1, (8, 6), (6, 1), "Linear", torch.bfloat16)


@on_ranks(4)
def test_hybrid_sharding_shows_hooks_the_shard_mesh_only(rank: int, world: int) -> None:
    ours, theirs = twice(Net)
    shard(torch_fsdp.fully_shard, theirs, mesh=grid(2, 2))
    shard(sw.fully_shard, ours, mesh=grid(2, 2))
    want = losses(theirs, rank)
    SEEN.clear()
    assert losses(ours, rank)[0] == want[0]
    assert {(size, ndim) for size, ndim, *_ in SEEN} == {(2, 1)}


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer", "shard_grad_op"])
@on_ranks(2)
def test_kept_copies_are_made_anew_after_a_step(rank: int, world: int, strategy: str) -> None:
    ours, theirs = twice(Net)
    shard(torch_fsdp.fully_shard, theirs, mesh=line(world))
    shard(sw.fully_shard, ours, mesh=line(world), strategy=strategy)
    SEEN.clear()
    assert losses(ours, rank) == losses(theirs, rank)
    assert {size for size, *_ in SEEN} == ({1, 2} if strategy == "no_shard" else {2})


@on_ranks(4)
def test_a_smaller_world_between_passes(rank: int, world: int) -> None:
    """Torch has no extensions there; ours gathers them from all ranks."""
    ours, whole = twice(Net)
    shard(sw.fully_shard, ours, mesh=line(world), reshard_after_forward=2)
    shard(sw.fully_shard, whole, mesh=line(world), reshard_after_forward=True)
    assert losses(ours, rank) == losses(whole, rank)


@on_ranks(2)
def test_memory_is_emptied_and_a_backward_gathers_what_it_needs(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = shard(sw.fully_shard, Net(), mesh=line(world), reshard_after_forward=True)
    block = model.blocks[0]
    block.unshard()
    cast, scaled = block[1].weight, block[0].weight
    held = gathered_bytes(model)
    assert held >= 8 * 6 + 8 * 4 + 6 * 8 * 2 + 6 * 8 * 4
    x = torch.ones(2, 8, requires_grad=True)
    out = torch.nn.functional.linear(x, cast)
    want = cast.detach().clone()
    block.reshard()
    assert gathered_bytes(model) == 0 and scaled.data_int8.untyped_storage().nbytes() == 0
    out.sum().backward()  # gathers what it needs
    torch.testing.assert_close(x.grad, want.sum(0).expand(2, -1))
    assert gathered_bytes(model) == 0


@on_ranks(2)
def test_state_dicts_and_copies_hold_the_subclass(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = shard(sw.fully_shard, Net(), mesh=line(world))
    losses(model, rank, steps=1)
    state = copy.deepcopy(model.state_dict())
    assert type(local(state["blocks.0.0.weight"])) is Scaled
    twin = copy.deepcopy(model)
    want = losses(model, rank)
    assert losses(twin, rank) == want
    model.load_state_dict(state)
    assert losses(model, rank) == want
    model.load_state_dict(copy.deepcopy(state), assign=True)
    assert losses(model, rank) == want


@on_ranks(2)
def test_meta_init_then_load(rank: int, world: int) -> None:
    torch.manual_seed(0)
    full = Net()
    model = shard(sw.fully_shard, copy.deepcopy(full), mesh=line(world))
    with torch.device("meta"):
        empty = Net()
    shard(sw.fully_shard, empty, mesh=line(world))
    empty.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"never initialised.*blocks\.0\.0\.weight"):
        empty(torch.ones(2, 6))
    empty.to_empty(device="cpu")
    empty.load_state_dict(copy.deepcopy(model.state_dict()))
    assert losses(empty, rank) == losses(model, rank)


def patch(model: nn.Module, calls: list[Any]) -> None:
    """Hooks on the local tensors themselves, without a subclass, as torch's own tests do it."""

    def pre(tensor: torch.Tensor, mesh: Any) -> Any:
        calls.append(("pre", mesh.ndim, mesh.size()))
        return (tensor,), None

    def post(
        tensor: torch.Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        calls.append(("post", out is None))
        return outputs[0], outputs

    for p in model.parameters():
        t = p._local_tensor
        t.fsdp_pre_all_gather = functools.partial(pre, t)
        t.fsdp_post_all_gather = functools.partial(post, t)


@on_ranks(4)
def test_hooks_set_on_local_tensors_after_to_empty(rank: int, world: int) -> None:
    histories = []
    for fully_shard in (torch_fsdp.fully_shard, sw.fully_shard):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
        for layer in model:
            fully_shard(layer, mesh=grid(2, 2))
        fully_shard(model, mesh=grid(2, 2))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                local(p).fill_(0.1 * (i + 1))
        calls: list[Any] = []
        patch(model, calls)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        for _ in range(3):
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(loss.item())
        histories.append(history)
        assert ("pre", 1, 2) in calls and {c[1:] for c in calls if c[0] == "pre"} == {(1, 2)}
        assert calls.count(("post", True)) == 4 and calls.count(("post", False)) >= 8
    assert histories[0] == histories[1]


@on_ranks(2)
def test_half_a_contract_is_refused(rank: int, world: int) -> None:
    class Half(Cast):
        fsdp_post_all_gather = property()  # type: ignore[assignment]

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Half.of(model.weight.data))
    with pytest.raises(AssertionError, match="weight: Both fsdp_pre_all_gather and"):
        sw.fully_shard(model)
    other = nn.Linear(4, 4)
    other.weight = nn.Parameter(Cast.of(other.weight.data))
    with pytest.raises(
        NotImplementedError, match=r"weight: a Cast .* dim 0 and .* found Shard\(1\)"
    ):
        sw.fully_shard(
            other, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1)
        )


@on_ranks(2)
def test_sizes_that_change_or_hooks_of_three_arguments_are_refused(rank: int, world: int) -> None:
    class Grows(Cast):
        grown = False

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (self.values if not Grows.grown else self.values[:1],), None

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(Grows.of(model.weight.data))
    sw.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    Grows.grown = True
    with pytest.raises(EngineError, match="weight: fsdp_pre_all_gather gave inputs of sizes"):
        model(torch.ones(2, 4))

    class Three(Cast):
        def fsdp_pre_all_gather(self, mesh: Any, a: Any, b: Any) -> Any:  # type: ignore[override]
            return (self.values,), None

    other = nn.Linear(4, 4)
    other.weight = nn.Parameter(Three.of(other.weight.data))
    sw.fully_shard(other)
    with pytest.raises(AssertionError, match="weight: Invalid fsdp_pre_all_gather"):
        other(torch.ones(2, 4))


@on_ranks(2)
def test_differing_weights_are_found_inside_of_subclasses(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Net()
    sw.fully_shard(model, mesh=line(world))
    seen: list[Any] = [None] * world
    model.unshard()
    dist.all_gather_object(seen, model.blocks[0][0].weight.data_int8.tolist())
    assert seen[0] == seen[1]
    model.reshard()


class Pair(TwoTensor):
    """Torch's own test subclass, trainable, whose full form and gradients are pairs too."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is not None:
            assert outputs[0].data_ptr() == out.a.data_ptr()
            assert outputs[1].data_ptr() == out.b.data_ptr()
            return None
        return Pair(*outputs), outputs


class PairNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        for block in self.blocks:
            for name, p in list(block.named_parameters()):
                setattr(block, name, nn.Parameter(Pair(p.detach().clone(), p.detach().clone())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_gradients_that_are_subclasses_reduce(rank: int, world: int) -> None:
    ours, theirs = twice(PairNet)
    shard(torch_fsdp.fully_shard, theirs, mesh=line(world))
    shard(sw.fully_shard, ours, mesh=line(world))
    assert losses(ours, rank) == losses(theirs, rank)


class Float8(nn.Module):
    """A frozen float8 weight without hooks beside trainable fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        weight = (0.1 * torch.randn(6, 6)).to(torch.float8_e4m3fn)
        self.frozen = nn.Parameter(weight, requires_grad=False)
        self.linear = nn.Linear(6, 6)
        self.blocks = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.frozen.to(x.dtype)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_float8_and_fp32_in_one_unit(rank: int, world: int, transport: str) -> None:
    ours, theirs = twice(Float8)
    shard(torch_fsdp.fully_shard, theirs, mesh=line(world))
    shard(sw.fully_shard, ours, mesh=line(world), transport=transport)
    assert losses(ours, rank) == losses(theirs, rank)


class Blocked(Scaled):
    """Knows the operations that FSDP2 cuts by, and no other: no slice but of the whole length."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        name = func._opname
        if name == "slice" and (args[2], args[3]) != (0, args[0].shape[0]):
            raise NotImplementedError(f"slice {args[1:]}")
        known = "split new_zeros slice copy_ detach view as_strided empty_like clone".split()
        if name not in known:
            raise NotImplementedError(name)
        return super().__torch_dispatch__(func, types, args, kwargs)


class WithAdapter(nn.Module):
    """A frozen base and a trainable low-rank branch."""

    def __init__(self, base: Any, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(base, requires_grad=False)
        self.a, self.b = nn.Linear(dim, 4, bias=False), nn.Linear(4, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))

    def base(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def as_plain_over_steps(make: Any, dim: int) -> None:
    plain, model = make(), make()
    sw.fully_shard(model)
    x = torch.linspace(-1, 1, 3 * dim).view(3, dim)
    opts = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (plain, model)
    ]
    for _ in range(3):
        outs = [m(x) for m in (plain, model)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-6)
        for out, opt in zip(outs, opts, strict=True):
            out.square().mean().backward()
            opt.step()
            opt.zero_grad()


@on_ranks(2, 3)
def test_cut_by_the_operations_that_fsdp2_uses(rank: int, world: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return WithAdapter(Blocked.of(torch.randn(12, 12)), 12)

    as_plain_over_steps(make, 12)


@on_ranks(2)
def test_frozen_nf4_weights_of_torchao(rank: int, world: int) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import to_nf4
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

    class Nf4(WithAdapter):
        """With torchao's own linear."""

        def base(self, x: torch.Tensor) -> torch.Tensor:
            return linear_nf4(x, self.weight)

    def make() -> Any:
        torch.manual_seed(0)
        return Nf4(to_nf4(torch.randn(256, 256)), 256)

    as_plain_over_steps(make, 256)
