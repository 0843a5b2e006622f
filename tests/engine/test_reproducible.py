"""The same bits on any number of ranks: losses, norms, weights; what breaks that is refused."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import ConvNorm, full, grid, line, make, weights_of
from mesh_kit import named_mesh, shard_layers, stack
from order_kit import Odd, Plan, loss_of, optimizer_of, train
from torch.distributed.tensor import Shard, distribute_module
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from ranks import on_ranks, run_ranks
from shardwise.engine.reproducible.norm import fold_rows
from shardwise.engine.reproducible.run import set_streams, stream_seed
from shardwise.errors import EngineError
from shardwise.layout.tree import canonical_sum


@functools.cache
def alone(num: int, mixed: bool = False, optimizer: str = "AdamW") -> list[str]:
    """The numbers of one rank, which all others must reproduce."""
    plan = Plan(1, num, "full_shard", mixed=mixed, optimizer=optimizer)
    return run_ranks(1, train, plan, timeout_s=120.0)[0]


PLANS = [
    *(Plan(w, 8, s) for w in (2, 3) for s in ("full_shard", "shard_grad_op", "no_shard")),
    Plan(2, 12, "shard_optimizer"),
    Plan(4, 12, "hybrid_shard"),
    Plan(8, 12, "full_shard"),
    Plan(4, 3, "no_shard"),  # more ranks than micro-batches
    Plan(3, 12, "full_shard", "c10d"),
    Plan(3, 8, "no_shard", "c10d"),
    Plan(4, 8, "hybrid_shard", "c10d"),
    Plan(4, 12, "hybrid_full_optimizer"),
    Plan(4, 8, "hybrid_full_optimizer", "c10d", mixed=True),
    Plan(3, 8, "full_shard", mixed=True),
    Plan(4, 12, "hybrid_shard", mixed=True),
    Plan(3, 8, "full_shard", recompute=True),
    Plan(2, 12, "shard_grad_op", "c10d", mixed=True, recompute=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bits_do_not_depend_on_the_ranks(plan: Plan) -> None:
    results = run_ranks(plan.world, train, plan, timeout_s=120.0)
    assert results == [alone(plan.num, plan.mixed)] * plan.world


class Counter(TorchDispatchMode):
    """A tool of the user's own that looks at operators."""

    num_collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def train_watched(rank: int, world: int, plan: Plan) -> list[str]:
    with Counter() as counter:  # shared memory takes process groups meanwhile
        lines = train(rank, world, plan)
    assert counter.num_collectives > 0
    return lines


@pytest.mark.parametrize(
    "plan", [Plan(3, 8, "full_shard"), Plan(4, 12, "hybrid_shard"), Plan(2, 8, "no_shard")], ids=str
)
def test_bits_do_not_depend_on_who_watches(plan: Plan) -> None:
    results = run_ranks(plan.world, train_watched, plan, timeout_s=120.0)
    assert results == [alone(plan.num)] * plan.world


# -- what is computed ----------------------------------------------------------------------------
@on_ranks(3)
def test_gradients_are_the_tree_sum_of_plain_ones(rank: int, world: int) -> None:
    """Bit for bit what a plain model gives, leaf by leaf; no scaling, no clipping."""
    plain, model = make(Odd), Plan(world).build()
    model.load_state_dict(plain.state_dict())
    leaves = []
    for index in range(7):
        set_streams(stream_seed(4, 2, index))
        plain.zero_grad()
        loss_of(plain, 2, index).backward()
        leaves.append({n: p.grad for n, p in plain.named_parameters()})
    with sw.reproducible(model, num_micro_batches=7, seed=4) as run:
        for micro in run.micro_batches(2):
            loss_of(model, 2, micro.index).backward()
            if not micro.is_spare and micro.index < 6:
                assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        want = canonical_sum([leaf[name] for leaf in leaves], torch.add) / 7
        assert torch.equal(full(p.grad), want), name


class Branches(nn.Module):
    """Parameters that only some micro-batches reach, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x).square().mean()


def train_branches(rank: int, world: int, transport: str) -> list[str]:
    model = make(Branches)
    options: dict[str, Any] = {"mesh": line(world), "transport": transport}
    sw.fully_shard(model, **options)  # one unit: branches inside of it
    lines = []
    with sw.reproducible(model, num_micro_batches=5) as run:
        for step in range(2):
            for micro in run.micro_batches(step):
                x = torch.randn(4, 5)
                model(x, micro.index // 3).backward()
            assert model.layers[2].weight.grad is None, "no micro-batch has one"
            lines += [full(model.layers[i].weight.grad).flatten().tolist() for i in (0, 1)]
            lines.append(float(sw.clip_grad_norm_(model.parameters(), math.inf)).hex())
            model.zero_grad()
    return lines


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
def test_parameters_that_some_micro_batches_do_not_reach(transport: str) -> None:
    expected = run_ranks(1, train_branches, "c10d")[0]
    assert run_ranks(3, train_branches, transport) == [expected] * 3


class Experts(nn.Module):
    """Units that only some micro-batches run; the last round runs neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if index < 4:
            x = self.layers[index % 2](x)
        return self.head(x).square().mean()


def train_experts(rank: int, world: int, strategy: str) -> list[str]:
    model = make(Experts)
    options = Plan(world, strategy=strategy)
    for unit in [*model.layers, model]:
        mesh = grid(2, world // 2) if strategy == "hybrid_shard" else line(world)
        transport = "c10d" if world == 1 else options.transport
        sw.fully_shard(unit, mesh=mesh, strategy=strategy, transport=transport)
    with sw.reproducible(model, num_micro_batches=6) as run:
        for micro in run.micro_batches(0):
            model(torch.randn(4, 5), micro.index).backward()
    return [float(full(p.grad).double().sum()).hex() for p in model.parameters()]


@pytest.mark.parametrize(
    "world,strategy", [(2, "full_shard"), (4, "hybrid_shard"), (3, "no_shard")]
)
def test_units_that_only_some_ranks_run(world: int, strategy: str) -> None:
    """Shared memory has no order of reductions, so ranks may run different units."""
    expected = run_ranks(1, train_experts, "full_shard")[0]
    assert run_ranks(world, train_experts, strategy) == [expected] * world


@on_ranks(2)
def test_spare_passes_are_not_counted(rank: int, world: int) -> None:
    model = Plan(world).build()
    with sw.reproducible(model, num_micro_batches=3) as run:
        seen = []
        for micro in run.micro_batches(0):
            loss = loss_of(model, 0, micro.index)
            loss.backward()
            micro.log(loss=1.0 + micro.index + 100 * micro.is_spare)
            seen.append((micro.index, micro.is_spare))
        assert seen == [[(0, False), (2, False)], [(1, False), (0, True)]][rank]
        assert run.means() == {"loss": 2.0}
        after = torch.rand(1).item()
    assert (
        after == torch.rand(1, generator=torch.Generator().manual_seed(stream_seed(0, 0, 3))).item()
    )


@on_ranks(2)
def test_torch_is_left_as_it_was(rank: int, world: int) -> None:
    model = Plan(world).build()
    before = torch.utils.deterministic.fill_uninitialized_memory
    with sw.reproducible(model, num_micro_batches=2):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before
    loss_of(model, 0, rank).backward()  # an ordinary backward again
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(1)
def test_norms_are_right(rank: int, world: int) -> None:
    model = Plan(world).build()
    with sw.reproducible(model, num_micro_batches=2) as run:
        for micro in run.micro_batches(0):
            loss_of(model, 0, micro.index).backward()
        flat = torch.cat([full(p.grad).double().flatten() for p in model.parameters()])
        for order in (1.0, 2.0, math.inf):
            norm = sw.clip_grad_norm_(model.parameters(), math.inf, order)
            torch.testing.assert_close(norm, flat.norm(order).float())
        sw.clip_grad_norm_(model.parameters(), 0.1)
        clipped = torch.cat([full(p.grad).double().flatten() for p in model.parameters()])
        assert clipped.norm().item() == pytest.approx(0.1, rel=1e-4)
        with pytest.raises(ValueError, match="in a reproducible run norms of order"):
            sw.clip_grad_norm_(model.parameters(), 1.0, 3.0)


class Wide(nn.Module):
    """Rows and columns long enough that their sums round differently."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(60, 3), nn.Linear(3, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def train_cut_anyhow(rank: int, world: int, strategy: str) -> list[str]:
    """The dim of a cut depends on the number of ranks, as rules like "the largest even one" do."""
    model = make(Wide)

    def place(param: nn.Parameter) -> Shard:
        return Shard(world % param.dim())

    mesh = grid(2, world // 2) if strategy.startswith("hybrid") else line(world)
    sw.fully_shard(model, mesh=mesh, strategy=strategy, shard_placement_fn=place)
    lines = []
    with sw.reproducible(model, num_micro_batches=5) as run:
        for step in range(2):
            for _ in run.micro_batches(step):
                model(torch.randn(4, 60)).square().sum().backward()
            for order in (1.0, 2.0, math.inf):
                for param in (model.a.weight, model.b.weight, model.a.bias):
                    norm = sw.clip_grad_norm_([param], math.inf, order)
                    lines.append(f"{step} {order} {float(norm).hex()}")
            lines.append(float(sw.clip_grad_norm_(model.parameters(), 0.5)).hex())
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad)
            model.zero_grad()
    return lines


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_full_optimizer"])
def test_norms_do_not_depend_on_the_dim_that_is_cut(strategy: str) -> None:
    """Rows are those of dim 0, however a parameter is cut."""
    expected = run_ranks(1, train_cut_anyhow, "full_shard")[0]
    for world in (4,) if strategy.startswith("hybrid") else (2, 3, 4):
        assert run_ranks(world, train_cut_anyhow, strategy) == [expected] * world


@pytest.mark.parametrize("width", [0, 1, 2, 3, 7, 64, 1000])
def test_rows_fold_alike_in_any_company(width: int) -> None:
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(1))
    whole = fold_rows(x.clone())
    for cuts in ([1] * 9, [2, 7], [4, 4, 1]):
        assert torch.equal(torch.cat([fold_rows(part.clone()) for part in x.split(cuts)]), whole)
    torch.testing.assert_close(whole, x.sum(1), rtol=1e-4, atol=1e-5)


# -- optimizers ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind",
    "SGD Adam NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split(),
)
def test_element_wise_optimizers(kind: str) -> None:
    plan = Plan(3, 8, optimizer=kind)
    assert run_ranks(3, train, plan, timeout_s=120.0) == [alone(8, optimizer=kind)] * 3


class Own(torch.optim.SGD):
    """Looks like SGD, may do anything."""


@on_ranks(1)
def test_optimizers_that_see_more_than_an_element_are_refused(rank: int, world: int) -> None:
    model = Plan(world).build()
    params = list(model.parameters())
    refused = {
        "LBFGS: takes dot products": lambda: torch.optim.LBFGS(params),
        "Adafactor: factors second moments": lambda: torch.optim.Adafactor(params),
        "SparseAdam: expects sparse gradients": lambda: torch.optim.SparseAdam(params),
        "Muon: orthogonalises whole matrices": lambda: torch.optim.Muon(
            [p for p in params if p.ndim == 2]
        ),
        "Own: is not known to work element by element": lambda: Own(params, lr=0.1),
        "AdamW, group 0: fused=True rounds": lambda: torch.optim.AdamW(params, fused=True),
    }
    for text, build in refused.items():
        with (
            pytest.raises(ValueError, match=f"(?s)cannot be reproducible.*{text}"),
            sw.reproducible(model, build(), num_micro_batches=2),
        ):
            pass


# -- refusals ------------------------------------------------------------------------------------
def refused(model: nn.Module, text: str) -> None:
    with (
        pytest.raises(ValueError, match=f"(?s)cannot be reproducible.*{text}"),
        sw.reproducible(model, num_micro_batches=2),
    ):
        pass


@on_ranks(2)
def test_what_breaks_the_promise_is_refused_at_the_start(rank: int, world: int) -> None:
    options: dict[str, Any] = {"mesh": line(world)}
    refused(
        sw.fully_shard(make(ConvNorm), **options),
        r"layers.0.1 \(BatchNorm2d\): its running statistics",
    )
    bf16 = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    refused(
        sw.fully_shard(nn.Linear(4, 4), mp_policy=bf16, **options),
        "weight: gradients would be summed in torch.bfloat16; set reduce_dtype=torch.float32",
    )
    refused(sw.fully_shard(nn.Linear(4, 4), transport="fake", **options), "'fake' cannot sum")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_all_reduce_hook(lambda t: None)
    refused(model, "set_all_reduce_hook changes sums")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_gradient_divide_factor(3.0)
    refused(model, "set_gradient_divide_factor has no meaning here")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_requires_gradient_sync(False)
    refused(model, "gradient synchronisation is off")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.weight.register_hook(lambda g: g)
    refused(model, "weight: has a gradient hook")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_custom_reduce_scatter(lambda **_: None)
    refused(model, "set_custom_reduce_scatter: sums go through")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_custom_all_gather(lambda **_: None)
    refused(model, "set_custom_all_gather: sums go through")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.set_requires_all_reduce(False)
    refused(model, "gradient synchronisation is off")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(model, "weight: has a gradient hook")
    model = sw.fully_shard(nn.Linear(4, 4), **options)
    sw.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused(model, "step_in_backward leaves no gradients to sum")
    model = sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), **options)
    refused(model, r"1 \(SyncBatchNorm\): takes statistics over all ranks")
    with pytest.raises(ValueError, match="holds no sharded module"):
        sw.reproducible(nn.Linear(4, 4), num_micro_batches=2).__enter__()
    with pytest.raises(ValueError, match="num_micro_batches: expected at least 1, found 0"):
        sw.reproducible(model, num_micro_batches=0)


class OwnMesh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)


@on_ranks(4)
def test_other_meshes_are_refused(rank: int, world: int) -> None:
    """Tensor parallel, a unit on a mesh of its own, a parameter on a mesh of its own."""
    tensor = named_mesh(dp=2, tp=2)
    model = shard_layers(sw.fully_shard, stack(tensor["tp"]), mesh=tensor["dp"])
    refused(model, r"up.weight: is a DTensor on other dims too \(tensor parallel\)")
    model = distribute_module(nn.Linear(4, 4), tensor)
    sw.fully_shard(model, mesh=tensor, dp_mesh_dims=sw.DataParallelMeshDims(shard="dp"))
    refused(model, r"its mesh \(.*\) has a dim without data parallelism \(tensor parallel\)")
    mesh = named_mesh(edp=2, ep=2)
    whole = mesh._flatten("everyone")
    for expert_mesh in (mesh["edp"], mesh):
        model = make(OwnMesh)
        sw.fully_shard(model.expert, mesh=expert_mesh)
        refused(
            sw.fully_shard(model, mesh=whole), "unit 'Linear': is on another mesh than 'OwnMesh'"
        )
    for expert_mesh in (mesh["edp"], mesh):
        model = make(OwnMesh)
        own = set(model.expert.parameters())
        sw.fully_shard(
            model,
            mesh=whole,
            shard_placement_fn=lambda p, own=own, mesh=expert_mesh: (
                sw.ShardPlacementResult(Shard(0), mesh) if p in own else None
            ),
        )
        refused(model, "expert.weight: is on another mesh than the rest of unit 'OwnMesh'")


@on_ranks(2)
def test_ranks_that_differ_are_refused(rank: int, world: int) -> None:
    model = Plan(world).build()
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        refused(model, "threads is 2 on rank 1, 1 on rank 0")
    finally:
        torch.set_num_threads(before)
    with (
        pytest.raises(ValueError, match=r"seed\) is \(2, 1\) on rank 1, \(2, 0\) on rank 0"),
        sw.reproducible(model, num_micro_batches=2, seed=rank),
    ):
        pass


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.linear(x).square().mean()


@on_ranks(2)
def test_misuse_inside_a_run(rank: int, world: int) -> None:
    model = Plan(world).build()
    with sw.reproducible(model, num_micro_batches=4) as run:
        with pytest.raises(EngineError, match="outside of run"):
            loss_of(model, 0, 0).backward()
        with pytest.raises(EngineError, match="no gradient was reduced"):
            for _ in run.micro_batches(0):
                pass
        with pytest.raises(EngineError, match="reduced twice in one micro-batch"):
            for _ in run.micro_batches(0):
                loss_of(model, 0, 0).backward()
                loss_of(model, 0, 0).backward()
        with pytest.raises(ValueError, match="in a reproducible run already"):
            sw.reproducible(model, num_micro_batches=4).__enter__()
        with pytest.raises(EngineError, match="global_mean"):
            for _ in run.micro_batches(0):
                sw.global_mean(loss_of(model, 0, 0), 3).backward()
        joined = iter(sw.join(model, range(1 + rank), mode="continue"))
        next(joined)
        with pytest.raises(EngineError, match=r"join\(\) in a reproducible run"):
            next(joined)  # rank 0 has run out
    counting = sw.fully_shard(Counts(), mesh=line(world))
    with (
        sw.reproducible(counting, num_micro_batches=2) as run,
        pytest.raises(EngineError, match="buffer seen: written by the forward"),
    ):
        for _ in run.micro_batches(0):
            counting(torch.ones(2, 4)).backward()


@on_ranks(2)
def test_an_exception_in_a_micro_batch(rank: int, world: int) -> None:
    """The step cannot go on with a part of its sums; started again, it is right."""
    model = Plan(world).build()
    with sw.reproducible(model, num_micro_batches=6) as run:
        micros = run.micro_batches(0)
        next(micros)
        loss_of(model, 0, 0).backward()
        next(micros)
        with pytest.raises(ZeroDivisionError):
            register = model.head.register_forward_hook(lambda *_: 1 / 0)
            loss_of(model, 0, 0)
        register.remove()
        with pytest.raises(EngineError, match="an exception ended an earlier micro-batch"):
            loss_of(model, 0, 0).backward()
        for micro in run.micro_batches(0):
            loss_of(model, 0, micro.index).backward()
        again = {n: full(p.grad) for n, p in model.named_parameters()}
        model.zero_grad()
        for micro in run.micro_batches(0):
            loss_of(model, 0, micro.index).backward()
        for n, p in model.named_parameters():
            assert torch.equal(full(p.grad), again[n]), n


@on_ranks(1)
def test_a_kernel_that_differs_from_run_to_run_is_named(rank: int, world: int) -> None:
    model = sw.fully_shard(nn.Linear(4, 4), mesh=line(world))
    with (
        sw.reproducible(model, num_micro_batches=1) as run,
        pytest.raises(RuntimeError, match="put_"),
    ):
        for _ in run.micro_batches(0):
            x = torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))  # accumulate=False
            model(x).sum().backward()


@on_ranks(1)
def test_cublas_is_to_be_told_before_it_starts(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is refused leaves the model out of it."""
    model = sw.fully_shard(nn.Linear(4, 4), mesh=line(world))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with monkeypatch.context() as pretended:
        pretended.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG is not set"):
            sw.reproducible(model, num_micro_batches=1).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()
    with sw.reproducible(model, num_micro_batches=1):
        assert torch.are_deterministic_algorithms_enabled()


def usual(rank: int, world: int) -> float:
    """Without the run, numbers do depend on the ranks: what the tests above compare is real."""
    plan = Plan(world, 12)
    model = plan.build()
    optimizer = optimizer_of("AdamW", model)
    share = plan.num // world
    for step in range(3):
        for i in range(rank * share, rank * share + share):
            set_streams(stream_seed(5, step, i))
            (loss_of(model, step, i) / share).backward()
        sw.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return float(sum(w.double().sum() for w in weights_of(model).values()))


def test_without_it_they_do() -> None:
    assert len({run_ranks(w, usual)[0] for w in (1, 2, 3)}) > 1
