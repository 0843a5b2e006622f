"""Every private torch name that we use does here what `_torch_compat` says of it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ranks import on_ranks
from shardwise import _torch_compat as compat


def test_graph_task_is_known_inside_a_backward_only() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(compat.graph_task()))
    assert compat.graph_task() is None
    y.sum().backward()
    assert len(seen) == 1 and isinstance(seen[0], int)
    assert compat.graph_task() is None


def test_end_of_backward_comes_last() -> None:
    order = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    x.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    y.register_hook(lambda _: compat.at_end_of_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["accumulated", "end"]


def test_versions_guard_saved_tensors() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = (w * torch.ones(3, requires_grad=True)).sum()
    before = w._version
    compat.set_versions((w,), (before + 1,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    compat.set_versions((w,), (before,))
    loss.backward()
    assert w.grad is not None


def test_functorch_is_seen() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.functorch_transform() is not None)
        return x.sin()

    torch.func.vmap(fn)(torch.ones(2))
    fn(torch.ones(2))
    assert seen == [True, False]


def test_a_registered_hook_may_be_replaced() -> None:
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    hooks, place = compat.add_accumulation_hook(x, lambda _: seen.append("first"))
    (x * 2).sum().backward()
    hooks[place] = lambda _: seen.append("second")
    (x * 2).sum().backward()
    assert seen == ["first", "second"]


def test_views_of_a_flat_tensor() -> None:
    flat = torch.arange(11.0)
    like = [torch.empty(shape, device="meta") for shape in ((2, 3), (4,))]
    first, second = compat.unflatten(flat, like)
    assert first.equal(flat[:6].view(2, 3)) and second.equal(flat[6:10])
    assert first.data_ptr() == flat.data_ptr() and second._base is flat


@on_ranks(2)
def test_collectives_of_a_group(rank: int, world: int) -> None:
    """What the functions of torch.distributed hand on, from 2.13 on."""
    if not hasattr(dist, "all_gather_single"):
        pytest.skip("the names are new in 2.13")
    group = dist.group.WORLD
    out, part = torch.zeros(4), torch.full((2,), float(rank))
    group.all_gather_single(out, part, compat.ALL_GATHER).wait()
    assert out.tolist() == [0, 0, 1, 1]
    group.reduce_scatter_single(part, torch.arange(4.0), compat.REDUCE_SCATTER).wait()
    assert part.tolist() == [[0, 2], [4, 6]][rank]


def test_hooks_are_read() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not compat.tensor_hooks(x) and not compat.post_accumulate_hooks(x)

    def hook(_: torch.Tensor) -> None:
        return None

    x.register_hook(hook)
    x.register_post_accumulate_grad_hook(hook)
    assert compat.tensor_hooks(x) == (hook,)
    assert compat.post_accumulate_hooks(x) == (hook,)


def test_frames_go_to_dynamo_below_compile_only() -> None:
    assert compat.frame_callback() is None
    seen = []

    @torch.compiler.disable(recursive=False)
    def outside(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.frame_callback() is not None)
        return x

    torch.compile(lambda x: outside(x) + 1, backend="eager")(torch.ones(2))
    assert seen == [True]


@on_ranks(2)
def test_specs_locals_and_store(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    plain = DTensor.from_local(torch.ones(2), mesh, (Shard(0),), run_check=False)
    again = compat.new_dtensor(DTensor, compat.local_of(plain), compat.spec_of(plain))
    assert again.placements == (Shard(0),) and again.shape == (4,)
    assert compat.local_of(again) is compat.local_of(plain)
    store = compat.default_store()
    assert store is not None
    store.set(f"compat/{rank}", "here")
    dist.barrier()
    assert store.get(f"compat/{1 - rank}") == b"here"


@on_ranks(4)
def test_meshes_and_placements(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert compat.joined_mesh([mesh["a"], mesh["b"]]) == mesh
    assert compat.flattened_mesh(mesh, "all").size() == 4
    assert compat.flattened_mesh(mesh, "all") == mesh["all"]  # a second time gives the first
    inner = compat.unflattened_mesh(mesh["all"], 0, (2, 2), ("outer", "inner"))["inner"]
    assert inner.mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    strided = compat.strided_shard(0, 2)
    assert compat.is_strided_shard(strided) and not compat.is_strided_shard(Shard(0))
    assert not strided.is_shard() and not strided.is_replicate()  # hence is_strided_shard
    whole = torch.arange(8.0)
    spec = compat.make_spec(mesh, (strided, Shard(0)), whole.shape, whole.stride(), whole.dtype)
    start = 4 * (rank % 2) + 2 * (rank // 2)  # the inner dim cuts first
    tensor = compat.new_dtensor(DTensor, whole[start : start + 2].clone(), spec)
    assert torch.equal(tensor.full_tensor(), whole)
    assert compat.waited_for(whole) is whole
    replicated = tensor.redistribute(placements=[Replicate(), Replicate()])
    assert type(compat.waited_for(compat.local_of(replicated))) is torch.Tensor


def test_registry_of_composable_apis() -> None:
    from torch.distributed._composable.replicate import _is_fully_sharded

    module = torch.nn.Linear(1, 1)
    assert not _is_fully_sharded(module) and not compat.is_replicated(module)
    compat.register_composable(module, "fully_shard")
    assert _is_fully_sharded(module) and not compat.is_replicated(module)
    compat.register_composable(module, "replicate")
    assert compat.is_replicated(module)


def test_frames_are_compiled_inside_what_is_disabled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def outer(x: torch.Tensor, like_here: bool) -> torch.Tensor:
        callback = compat.frame_callback()
        assert callback is not None
        call = compat.with_frame_callback(callback, inner) if like_here else inner
        return torch.compiler.disable(lambda: call(x))()

    for like_here, expected in ((False, 0), (True, 1)):
        torch._dynamo.reset()
        graphs.clear()
        run = torch.compile(torch.compiler.disable(outer, recursive=False), backend=backend)
        run(torch.ones(2), like_here)
        assert len(graphs) == expected
    assert compat.frame_callback() is None


def test_memory_changes_storages_and_views_follow() -> None:
    first, second = torch.arange(6.0), torch.zeros(6)
    view, storages = first[2:4], (first.untyped_storage(), second.untyped_storage())
    addresses = [storage.data_ptr() for storage in storages]
    if not compat.swap_memory(*storages):
        pytest.skip("this torch cannot exchange the memory of storages")
    assert [storage.data_ptr() for storage in storages] == addresses[::-1]
    assert second.tolist() == [0, 1, 2, 3, 4, 5] and view.data_ptr() == addresses[1] + 8
    empty = torch.UntypedStorage(0)
    assert compat.swap_memory(storages[0], empty)
    assert storages[0].nbytes() == 0 and empty.data_ptr() == addresses[1]
    storages[0].resize_(24)  # it can still be resized, with memory of its own
    assert view.fill_(7).tolist() == [7, 7]


@on_ranks(2)
def test_the_backend_that_serves_a_device(rank: int, world: int) -> None:
    assert compat.backend_name(None, torch.device("cpu")) == "gloo"
    assert compat.backend_name(dist.group.WORLD, torch.device("cpu")) == "gloo"


def test_what_autograd_says_of_a_tensor_that_was_written() -> None:
    w = torch.ones(2, 3, requires_grad=True)
    loss = (w * torch.ones(2, 3, requires_grad=True)).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert compat.written_since(caught.value) == (6, w._version)
    assert compat.written_since(RuntimeError("another one")) is None


@on_ranks(2)
def test_what_dtensor_says_when_it_refuses(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    cut = DTensor.from_local(torch.ones(2 - rank, 4), mesh, [Shard(0)], shape=(3, 4), stride=(4, 1))
    with pytest.raises(RuntimeError) as caught:
        cut + torch.ones(3, 4)
    assert compat.says_mixed(caught.value) and not compat.says_uneven(caught.value)
    with pytest.raises(RuntimeError) as caught:
        cut.view(-1)
    assert compat.says_uneven(caught.value) and not compat.says_mixed(caught.value)


def test_leaves_of_a_graph() -> None:
    w = torch.ones(2, requires_grad=True)
    node = (w * 2).grad_fn
    assert node is not None
    leaves = [compat.leaf_of(behind) for behind, _ in node.next_functions if behind is not None]
    assert any(leaf is w for leaf in leaves) and compat.leaf_of(node) is None


def test_hooks_are_shared() -> None:
    """A handle removes a hook from whatever tensor it went over to."""
    before, after, seen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    handles = [
        before.register_hook(lambda _: seen.append("gradient")),
        before.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated")),
    ]
    hooks = compat.hooks_of(before)
    compat.share_hooks(after, hooks)
    assert all(a is b for a, b in zip(compat.hooks_of(after), hooks, strict=True))
    assert [len(kept) for kept in hooks] == [1, 1]
    for handle in handles:
        handle.remove()
    assert compat.tensor_hooks(after) == compat.post_accumulate_hooks(after) == ()
    assert not seen


def test_a_dtensor_that_others_hold_changes() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        held = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        other = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)])
        compat.repoint(held, compat.local_of(other), compat.spec_of(other))
        assert held.shape == (4, 4) and held.placements == (Shard(1),)
        assert held.to_local().data_ptr() == other.to_local().data_ptr()
    finally:
        dist.destroy_process_group()


def test_modules_and_parametrizations_on_the_stack() -> None:
    seen: list[list[str]] = []

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append([type(m).__name__ for m in compat.modules_running()])
            return x

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append([str(compat.in_parametrization())])
            return 2 * x

    torch.nn.Sequential(Inner())(torch.ones(1))
    layer = torch.nn.Linear(2, 2)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    assert seen[0] == ["Inner", "Sequential"]
    seen.clear()
    assert layer.weight.shape == (2, 2)
    Doubled()(torch.ones(1))
    assert seen == [["True"], ["False"]]
