"""What tools see of a sharded model: storages, files, copies, attributes of parameters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import STRATEGIES, Blocks, Setting, batch, full, loss_of, make, settings
from torch.nn.utils import parametrizations

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import EngineError

WAYS = [*settings(*STRATEGIES), Setting("hybrid_full_optimizer", "shared_memory")]


def steps(model: Any, rank: int, opt: Any = None, first: int = 0, num: int = 1) -> None:
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, first + num):
        loss_of(model(batch(model, step, rank))).backward()
        opt.step()
        opt.zero_grad()


# -- storages ------------------------------------------------------------------------------------
@pytest.mark.parametrize("setting", WAYS, ids=str)
@on_ranks(4)
def test_shards_have_addresses_of_their_own(setting: Setting, rank: int, world: int) -> None:
    """12 rows of a norm over 4 ranks, 11 of an embedding, and fewer rows than ranks: empty parts
    have an address too. Tied entries share theirs.
    """
    model = make(Blocks)
    model.few = nn.Parameter(torch.ones(2))
    model.fewer = nn.Parameter(torch.ones(2))
    setting.shard(model, world)
    for _ in range(2):
        by_storage: dict[int, list[str]] = {}
        for name, t in model.state_dict().items():
            by_storage.setdefault(t.to_local().untyped_storage().data_ptr(), []).append(name)
        assert 0 not in by_storage
        assert [n for n in by_storage.values() if len(n) > 1] == [["embed.weight", "head.weight"]]
        model.bfloat16()  # laid out anew


@on_ranks(2)
def test_entries_of_a_state_dict_alias_the_parameters(rank: int, world: int) -> None:
    model = Setting("full_shard", "shared_memory").shard(make(Blocks), world)
    entries = model.state_dict()
    steps(model, rank, num=2)
    for name, p in model.named_parameters():
        assert entries[name].to_local().data_ptr() == p.to_local().data_ptr()
        assert torch.equal(full(entries[name]), full(p))
    entries["norm.weight"].fill_(7.0)
    assert (full(model.norm.weight) == 7.0).all()
    with torch.no_grad():
        out = model(batch(model, 9, rank))  # the write is seen
        entries["norm.weight"].fill_(0.0)
        assert not torch.equal(out, model(batch(model, 9, rank)))


@on_ranks(2)
def test_a_file_of_one_shard_holds_its_bytes(rank: int, world: int) -> None:
    model = sw.fully_shard(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    file = io.BytesIO()
    torch.save(model[0].bias.to_local(), file)
    assert file.tell() < 4096


@on_ranks(2)
def test_safetensors_takes_the_local_parts(rank: int, world: int, tmp_path: Any) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = Setting("full_shard", "shared_memory").shard(make(Blocks), world)
    parts = {n: p.detach().to_local() for n, p in model.named_parameters()}
    files.save_file(parts, tmp_path / f"{rank}.safetensors")
    found = files.load_file(tmp_path / f"{rank}.safetensors")
    assert all(torch.equal(found[n], part) for n, part in parts.items())


# -- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_full_optimizer"])
@on_ranks(4)
def test_a_rank_file_loads_with_the_defaults(
    strategy: str, rank: int, world: int, tmp_path: Any
) -> None:
    def start() -> tuple[Any, Any]:
        model = Setting(strategy, "shared_memory").shard(make(Blocks), world)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, opt = start()
    steps(model, rank, opt, num=2)
    path = tmp_path / f"{rank}.pt"
    torch.save({"m": model.state_dict(), "o": opt.state_dict(), "p": [*model.parameters()]}, path)
    found = torch.load(path)
    other, other_opt = start()
    other.load_state_dict(found["m"])
    other_opt.load_state_dict(found["o"])
    assert isinstance(found["p"][0], nn.Parameter)
    for m, o in ((model, opt), (other, other_opt)):
        steps(m, rank, o, first=2)
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(full(p), full(q)), n


# -- calls that FSDP2 refuses --------------------------------------------------------------------
class Experts(nn.ModuleList):
    """A container with a forward of its own."""

    def __init__(self, num: int = 2) -> None:
        super().__init__(nn.Linear(8, 8) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self)  # type: ignore[return-value]


class Named(nn.ModuleDict):
    """The same by names."""

    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["b"](self["a"](x))


@pytest.mark.parametrize("kind", [Experts, Named])
@on_ranks(2)
def test_containers_with_a_forward(kind: Any, rank: int, world: int) -> None:
    plain, model = make(kind), make(kind)
    sw.fully_shard(model)
    assert len(model) == 2 and isinstance(model, kind)
    assert type(plain)() is not None and type(model).__name__ == f"FSDP{kind.__name__}"
    for m in (plain, model):
        m(torch.ones(2, 8)).sum().backward()
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p.grad), q.grad), n


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
@on_ranks(1)
def test_containers_without_one(kind: Any, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="do not implement forward"):
        sw.fully_shard(kind())


@on_ranks(1)
def test_sharding_twice(rank: int, world: int) -> None:
    model = sw.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"module once.*Sequential.*0\.weight, 0\.bias") as caught:
        sw.fully_shard(model)
    assert isinstance(caught.value, AssertionError)  # as torch's


@on_ranks(2)
def test_settings_that_cannot_be(rank: int, world: int) -> None:
    model: Any = sw.fully_shard(nn.Sequential(nn.Linear(4, 4)))
    for wrong in (True, 1.5, None, "1"):
        with pytest.raises(TypeError, match="max_input_buffers: expected an int"):
            model.set_reduce_scatter_max_input_buffers(wrong)
    for few in (0, -1):
        with pytest.raises(ValueError, match="max_input_buffers: expected 1 or more"):
            model.set_reduce_scatter_max_input_buffers(few)
    model.set_allocate_memory_from_process_group_for_comm(True)

    class Gather:
        """Is not called here."""

    for kind in ("all_gather", "reduce_scatter"):
        one: Any = sw.fully_shard(nn.Linear(4, 4))
        getattr(one, f"set_custom_{kind}")(Gather())
        for call in (
            lambda m: m.set_allocate_memory_from_process_group_for_comm(True),
            lambda m: m.set_symm_mem_for_comm(),
        ):
            with pytest.raises(
                ValueError, match=f"{kind.replace('_', ' ')} comm is custom: Gather"
            ):
                call(one)
    with pytest.raises(ValueError, match="symmetric memory is CUDA's"):
        model.set_symm_mem_for_comm()


@on_ranks(2)
def test_a_divide_factor_leaves_units_alone_that_have_their_own(rank: int, world: int) -> None:
    def layers() -> Any:
        return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))

    model, mean = layers(), layers()
    for part in (model[0], model[2], model):
        sw.fully_shard(part)
    model[0].set_gradient_divide_factor(4.0)
    model.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 4)).sum().backward()
    mean.load_state_dict({n: full(t) for n, t in model.state_dict().items()})
    mean(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(full(model[0].weight.grad), mean[0].weight.grad * world / 4)
    for i in (1, 2):
        torch.testing.assert_close(full(model[i].weight.grad), mean[i].weight.grad * world)


# -- what users hang on parameters ---------------------------------------------------------------
class Own(nn.Parameter):
    """A class of the user's own."""


class Scaled(nn.Linear):
    """Computes with attributes of its parameters, and writes some."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = Own(self.weight.detach())
        self.weight.scale = torch.rand(8, 1)
        self.bias.flag = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Own)
        self.weight.seen = getattr(self.weight, "seen", 0) + 1
        late = getattr(self.weight, "late", 1.0)
        return nn.functional.linear(x, self.weight * self.weight.scale * late, self.bias * 2)


@pytest.mark.parametrize("setting", [*WAYS, Setting(None, "c10d", False)], ids=str)
@on_ranks(4)
def test_attributes_are_on_every_form(setting: Setting, rank: int, world: int) -> None:
    def net() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(), nn.Tanh(), Scaled())
        model.layers = [model[0]]  # a unit of its own
        return model

    plain, model = net(), setting.shard(net(), world)
    x = batch(model, 0, 0)  # the same on all ranks
    for step in range(3):
        for m in (plain, model):
            loss_of(m(x)).backward()
            m[0].weight.late = 0.5 + step  # at rest
            assert m[0].weight.seen == m[2].weight.seen == step + 1
            assert m[2].bias.flag == 2.0
        if step == 0:
            model.to(torch.float64)
            plain.to(torch.float64)
            x = x.double()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad = q.grad = None
    loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=n)
    copied = copy.deepcopy(model)
    assert copied[0].weight.late == 2.5 and copied[0].weight.seen == 4
    assert torch.equal(copied[0].weight.scale, model[0].weight.scale)
    copied[0].weight.late = 0.0
    assert model[0].weight.late == 2.5
    del model[2].bias.flag
    assert not hasattr(model[2].bias, "flag")


@pytest.mark.parametrize("when", ["before", "after", "moved"])
@pytest.mark.parametrize("setting", [*WAYS, Setting(None, "c10d", False)], ids=str)
@on_ranks(4)
def test_hooks_fire_once_and_their_handles_remove_them(
    setting: Setting, when: str, rank: int, world: int
) -> None:
    calls: list[str] = []
    handles: list[Any] = []

    def hook(what: str, result: Any = None) -> Any:
        return lambda *_, **__: (calls.append(what), result)[1]

    def set_hooks(model: Any) -> None:
        for i in (0, 2):
            for n, p in model[i].named_parameters():
                handles.append(p.register_hook(hook(f"grad {i}.{n}")))
                made = p.register_post_accumulate_grad_hook(hook(f"accumulated {i}.{n}"))
                handles.append(made)
            for key, options in {
                "forward_pre": {"prepend": True, "with_kwargs": True},
                "forward": {"always_call": True, "with_kwargs": True},
                "full_backward_pre": {"prepend": True},
                "full_backward": {},
            }.items():
                made = getattr(model[i], f"register_{key}_hook")(hook(f"{key} {i}"), **options)
                handles.append(made)

    def net() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        model.layers = [model[0]]
        return model

    def run(m: Any) -> list[str]:
        calls.clear()
        loss_of(m(batch(m, 0, rank).requires_grad_())).backward()
        return sorted(calls)

    plain, model = net(), net()
    set_hooks(plain)
    want = run(plain)
    assert len(want) == len(set(want)) == 16
    handles.clear()
    set_hooks(model) if when != "after" else None
    setting.shard(model, world)
    set_hooks(model) if when == "after" else None
    model.float() if when == "moved" else None
    assert run(model) == want
    assert run(model) == want
    for handle in handles:
        handle.remove()
    assert run(model) == []


# -- copies, pickles, parametrizations -----------------------------------------------------------
@pytest.mark.parametrize("setting", [*WAYS, Setting(None, "c10d", False)], ids=str)
@on_ranks(4)
def test_a_shallow_copy_is_another_module_over_the_same_parameters(
    setting: Setting, rank: int, world: int
) -> None:
    model = setting.shard(make(Blocks), world)
    x = batch(model, 0, rank)
    want = model(x).detach().clone()
    model(x).sum().backward()
    model.zero_grad()
    copied = copy.copy(model)
    assert type(copied) is type(model) and copied.norm.weight is model.norm.weight
    assert torch.equal(copied(x).detach(), want)
    del model
    copied.extra = 1
    opt = torch.optim.SGD(copied.parameters(), lr=0.1)
    loss_of(copied(x)).backward()
    opt.step()
    assert not torch.equal(copied(x).detach(), want)
    inner = copy.copy(copied.layers[0])
    h = torch.ones(1, 2, 12)
    with torch.no_grad():
        assert torch.equal(inner(h), copied.layers[0](h))
    deep = copy.deepcopy(copied)
    assert deep.norm.weight is not copied.norm.weight
    assert torch.equal(full(deep.norm.weight), full(copied.norm.weight))


@on_ranks(2)
def test_a_pickle_is_refused_with_the_remedy(rank: int, world: int) -> None:
    model = nn.ModuleDict({"inner": sw.fully_shard(nn.Linear(4, 4))})  # a part of it is sharded
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(EngineError, match=r"Linear cannot be pickled.*model\.state_dict\(\)"):
            dump(model)


def parametrized(kind: str, made: nn.Module) -> nn.Module:
    make_one = getattr(parametrizations, kind, None)
    return make_one(made) if make_one is not None else torch.nn.utils.weight_norm(made)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral_norm", "old_weight_norm"])
@pytest.mark.parametrize("setting", [*settings("full_shard", "no_shard", "shard_grad_op")], ids=str)
@on_ranks(2)
def test_parametrizations_are_removed_as_from_a_plain_model(
    setting: Setting, kind: str, rank: int, world: int
) -> None:
    def net() -> Any:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 4)]
        model = nn.Sequential(*(parametrized(kind, part) for part in parts))
        model.layers = [model[0], model[1]]
        return model

    plain, model = net(), setting.shard(net(), world)
    x = torch.linspace(-1, 1, 18).view(3, 6)
    for _ in range(2):
        for m in (plain, model):
            opt = torch.optim.SGD(m.parameters(), lr=0.1)
            m(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for m in (plain, model):
        m.eval()
        for part in m:
            if kind == "old_weight_norm":
                torch.nn.utils.remove_weight_norm(part)
            else:
                torch.nn.utils.parametrize.remove_parametrizations(part, "weight")
    want = plain.state_dict()
    found = {n: full(t) for n, t in model.state_dict().items()}
    assert set(found) == set(want)
    for _ in range(2):  # before and behind a step, which takes the new parameters in
        for n, t in found.items():
            torch.testing.assert_close(t, want[n], rtol=1e-5, atol=1e-6, msg=n)
        for m in (plain, model):
            m(x).square().mean().backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        found, want = {n: full(t) for n, t in model.state_dict().items()}, plain.state_dict()
    assert all(hasattr(p, "placements") for p in model.parameters())


class Pretrained(Blocks):
    """Writes itself as models of `transformers` do."""

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None
    ) -> str:
        assert self.should_save_on_this_rank(is_main_process)
        state = state_dict or self.state_dict()
        by_storage = {t.untyped_storage().data_ptr() for t in state.values()}
        assert len(by_storage) == len(state) - 1  # the head is tied
        torch.save(state, save_directory / "weights.pt")
        return "written"

    def should_save_on_this_rank(self, is_main_process: bool) -> bool:
        return False


@pytest.mark.parametrize("setting", WAYS, ids=str)
@on_ranks(4)
def test_a_model_that_writes_itself_writes_whole_weights(
    setting: Setting, rank: int, world: int, tmp_path: Any
) -> None:
    model = setting.shard(make(Pretrained), world)
    steps(model, rank)
    own = tmp_path / str(rank)
    own.mkdir()
    assert model.save_pretrained(own, is_main_process=rank == 2) == (
        "written" if rank == 2 else None
    )
    assert (own / "weights.pt").exists() == (rank == 2)
    want = {n: full(t) for n, t in model.state_dict().items()}
    assert model.save_pretrained(own) == ("written" if rank == 0 else None)
    if rank in (0, 2):
        found = torch.load(own / "weights.pt")
        assert set(found) == set(want)
        for name, t in found.items():
            assert type(t) is torch.Tensor and torch.equal(t, want[name]), name
    steps(model, rank, first=1)


@on_ranks(2)
def test_numbers_that_all_ranks_have_are_shown(rank: int, world: int) -> None:
    model = sw.fully_shard(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model.weight)
    # The root of a sum of roots' squares: the last place is the processor's.
    assert repr(torch.linalg.vector_norm(model.weight.detach()).full_tensor()).startswith(
        "tensor(4."
    )
    model(torch.ones(1, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    assert "tensor(4." in repr(norm) and abs(float(f"{norm}") - 4.0) < 1e-5


@on_ranks(2)
def test_a_sharded_state_dict_in_a_plain_model(rank: int, world: int) -> None:
    plain = nn.Linear(4, 4)
    state = sw.fully_shard(nn.Linear(4, 4)).state_dict()
    with pytest.raises(RuntimeError, match=r"of which this rank has its rows only.*full_tensor"):
        plain.load_state_dict(state)
