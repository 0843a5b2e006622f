"""The shared-memory transport when things go wrong:

exceptions, deaths, divergence, time; and what it holds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from axes import alone, hybrid_axes, shard_axis
from test_shared_memory import CPU, F32, at, gather

import shardwise.comm.shared_memory.access as access_module
from ranks import announce, on_ranks, spawn_ranks
from shardwise.comm.kept import kept
from shardwise.comm.limits import set_wait_limit
from shardwise.comm.shared_memory import SharedMemoryTransport, shared_memory_reason
from shardwise.comm.shared_memory.domain import domain_of
from shardwise.comm.shared_memory.futex import MemoryOrder
from shardwise.comm.transport import Bucket, Transport
from shardwise.errors import DivergenceError, PeerTimeoutError, TransportError
from shardwise.layout import BucketLayout, ParamSpec, layout_bucket, layout_reduce

MIB = 2**20


def transport_of(rank: int, world: int) -> SharedMemoryTransport:
    return SharedMemoryTransport(shard_axis(rank, world), alone("replicate", rank))


def flat_layout(numel: int, world: int) -> BucketLayout:
    spec = ParamSpec("w", (numel,), F32)
    return layout_bucket([spec], gather_dtype=F32, reduce_dtype=F32, world=world)


def bucket_of(transport: Transport, numel: int, world: int, name: str = "u[0]") -> Bucket:
    return transport.attach(name, flat_layout(numel, world), CPU)


def held_bytes(transport: SharedMemoryTransport) -> int:
    """Pages of this rank's memfd."""
    return os.fstat(transport._domain.arena.fd).st_blocks * 512


def reduce_ones(transport: SharedMemoryTransport, bucket: Bucket, value: float = 1.0):
    layout = layout_reduce(bucket.layout)
    out = torch.empty(layout.chunk_numel)
    grads = transport.grad_buffer(bucket, layout, out)
    grads.put(0, torch.full(bucket.layout.params[0].spec.shape, value))
    return transport.reduce(bucket, grads, out, 1.0), out


# -- exceptions
@on_ranks(2, 3)
def test_an_exception_on_one_rank_ends_the_phase_on_all(rank: int, world: int) -> None:
    """Whatever the ranks do meanwhile, all leave a phase or all get an error;

    the next phase works.
    """
    transport, same = transport_of(rank, world), random.Random(23)
    bucket, own = bucket_of(transport, 1000, world), random.Random(rank)
    for step in range(120):
        culprits = {r for r in range(world) if same.random() < 0.3}
        moment = same.choice(("before", "between", "after"))
        phase = same.choice(("forward", "backward"))
        failed = False
        try:
            transport.enter(at(step, phase))
            if rank in culprits and moment == "before":
                raise KeyError("mine")
            if own.random() < 0.3:
                time.sleep(0.002)
            assert (gather(transport, bucket)[:1000] == step).all()
            if rank in culprits and moment == "between":
                raise KeyError("mine")
            if phase == "backward":
                handle, out = reduce_ones(transport, bucket)
                handle.wait()
                assert out[0] == world
            if rank in culprits and moment == "after":
                raise KeyError("mine")
            transport.leave(at(step, phase))
        except (KeyError, TransportError) as error:
            failed = True
            assert isinstance(error, KeyError) == (rank in culprits) or culprits - {rank}
            assert isinstance(error, KeyError) or "ended pass" in str(error)
            transport.abandon()
            transport.abandon()
        assert failed == bool(culprits)
        bucket.buffer.fill_(step + 1)


@on_ranks(2)
def test_what_was_pending_fails_after_an_exception(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 64, world)
    layout = layout_reduce(bucket.layout)
    out = torch.empty(layout.chunk_numel)
    transport.enter(at(0, "backward"))
    grads = transport.grad_buffer(bucket, layout, out)
    grads.put(0, torch.ones(64))
    if rank == 0:
        handle = transport.reduce(bucket, grads, out, 1.0)
    transport.abandon()
    if rank == 0:
        with pytest.raises(TransportError, match=r"the reduction of u\[0\] was dropped"):
            handle.wait()
    transport.enter(at(1, "backward"))
    if rank == 1:
        with pytest.raises(RuntimeError, match="serves one reduction"):
            transport.reduce(bucket, grads, out, 1.0)
        grads.discard()
    with pytest.raises(AssertionError, match="reduced once"):
        transport.reduce(bucket, grads, out, 1.0)
    handle, out = reduce_ones(transport, bucket)
    handle.wait()
    assert out.tolist() == [2.0] * 32 + [0.0] * 3 + [2.0]
    transport.leave(at(1, "backward"))


@on_ranks(2)
def test_what_a_peer_did_before_its_exception_counts(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reduces, ends, and gives up for a reason to which rank 1 may come too (a hook of the
    sum). All of that happens between two looks of rank 1, which then has the sum as well.
    """
    transport = transport_of(rank, world)
    domain = transport._domain
    bucket = bucket_of(transport, 64, world)
    transport.enter(at(0, "backward"))
    if rank == 0:
        time.sleep(0.3)  # rank 1 has looked, in vain
        handle, out = reduce_ones(transport, bucket)
        assert transport.missing(at(0, "backward")) == []
    else:
        heard = domain._is_abandoned

        def hears_late() -> bool:
            while not heard():
                time.sleep(0.001)
            return True

        handle, out = reduce_ones(transport, bucket)
        with monkeypatch.context() as patch:
            patch.setattr(domain, "_is_abandoned", hears_late)
            assert transport.missing(at(0, "backward")) == []
    handle.wait()
    assert out[0] == 2.0
    transport.abandon()


@on_ranks(2)
def test_calls_at_the_wrong_moment(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 64, world)
    with pytest.raises(TransportError, match=r"outside of a phase; call enter"):
        gather(transport, bucket)
    transport.enter(at(3))
    with pytest.raises(TransportError, match="'other' entered while pass 3, forward, unit 'root'"):
        transport.enter(at(3, unit="other"))
    with pytest.raises(TransportError, match="gathers from the bucket's own buffer"):
        transport.gather(bucket, bucket.buffer.clone(), torch.empty(64))
    with pytest.raises(
        ValueError, match=r"w: expected a gradient of shape \(64,\), found \(8, 8\)"
    ):
        layout = layout_reduce(bucket.layout)
        transport.grad_buffer(bucket, layout, torch.empty(33)).put(0, torch.ones(8, 8))
    transport.leave(at(3))
    with pytest.raises(ValueError, match=r"x\[0\]: the layout is for 3 ranks, axis 'shard' has 2"):
        transport.attach("x[0]", flat_layout(64, 3), CPU)


# -- divergence
@on_ranks(2)
def test_different_positions_are_named_on_all_ranks(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 64, world)
    transport.enter(at(7, "forward" if rank else "backward", f"net{rank}"))
    with pytest.raises(DivergenceError, match=r"pass 7, forward, unit 'net1'") as caught:
        gather(transport, bucket)
    assert "pass 7, backward, unit 'net0'" in str(caught.value)
    transport.abandon()


@on_ranks(2)
def test_different_buckets_are_named(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 64 + 64 * rank, world, name=f"layers.{rank}[0]")
    transport.enter(at(0))
    # Whoever looks first names the difference; it has then ended the phase for the other.
    theirs = rf"holds 'layers.{1 - rank}\[0\]' of {256 - 128 * rank} bytes"
    with pytest.raises((DivergenceError, TransportError), match=f"{theirs}|ended pass 0"):
        gather(transport, bucket)
    transport.abandon()
    bucket = bucket_of(transport, 64, world)
    if rank == 1:
        del bucket
        gc.collect()
    transport.enter(at(1))
    if rank == 0:
        with pytest.raises(DivergenceError, match="rank 1 has released it"):
            gather(transport, bucket)
        transport.abandon()
    else:
        with pytest.raises(TransportError, match="rank 0 ended pass 1"):
            transport.leave(at(1))


@on_ranks(2)
def test_different_trainable_parameters_are_named(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    specs = [ParamSpec(f"p{i}", (8,), F32) for i in range(2)]
    layout = layout_bucket(specs, gather_dtype=F32, reduce_dtype=F32, world=world)
    bucket = transport.attach("u[0]", layout, CPU)
    reduce = layout_reduce(layout, (True, rank == 0))
    out = torch.empty(reduce.chunk_numel)
    transport.enter(at(0, "backward"))
    with pytest.raises((DivergenceError, TransportError)) as caught:
        grads = transport.grad_buffer(bucket, reduce, out)
        grads.put(0, torch.ones(8))
        transport.reduce(bucket, grads, out, 1.0).wait()
    transport.abandon()
    errors: list[str] = [""] * world
    dist.all_gather_object(errors, str(caught.value))
    assert any("requires_grad" in error for error in errors)


# -- time and death
@on_ranks(2)
def test_a_wait_ends_with_who_waits_for_whom(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 64, world)
    transport.enter(at(0))
    gather(transport, bucket)
    transport.leave(at(0))
    if rank == 0:
        set_wait_limit(0.6)
        transport.enter(at(1, "unshard", "layers.4"))
        with pytest.raises(PeerTimeoutError) as caught:
            gather(transport, bucket)
        text = str(caught.value)
        assert "rank 0 waits for rank 1 to enter the same phase, for 1 s" in text
        assert "rank 0: pass 1, unshard, unit 'layers.4'" in text
        assert "rank 1: pass 0, forward, unit 'root'" in text and "left: in user code" in text
        assert "raise SHARDWISE_WAIT_LIMIT_S (now 0.6 s)" in text
        assert "waits here" in text and "start all ranks again" in text
        transport.abandon()
        set_wait_limit()
    dist.barrier()
    if rank == 1:
        transport.enter(at(1, "unshard", "layers.4"))
        with pytest.raises(TransportError, match="rank 0 ended pass 1"):
            gather(transport, bucket)
        transport.abandon()


def train_until_killed(rank: int, world: int, where: str) -> tuple[str, float, int]:
    """What the survivors' error says, when it came, and the inode of this rank's memory."""
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 1 << 16, world)
    inode = os.fstat(transport._domain.arena.fd).st_ino
    Path(f"/proc/self/task/{os.getpid()}/comm").write_text("shardwise-test")
    try:
        for step in range(10**6):
            transport.enter(at(step))
            gather(transport, bucket)
            transport.leave(at(step))
            transport.enter(at(step, "backward"))
            reduce_ones(transport, bucket)[0].wait()
            transport.leave(at(step, "backward"))
            if step == 20:
                announce("running")
            if step == 30 and rank == 1 and where == "user":
                time.sleep(60)
    except TransportError as error:
        return str(error), time.monotonic(), inode
    raise AssertionError("the killed rank was not missed")


@pytest.mark.parametrize("where", ["user", "engine"])
def test_kill_9_is_named_within_seconds_and_nothing_survives(where: str) -> None:
    with spawn_ranks(3, train_until_killed, where) as group:
        for rank in range(3):
            group.wait_for("running", rank=rank)
        time.sleep(0.3 if where == "user" else random.Random().random() * 0.05)
        mapped = {name for pid in group.pids for name in files_in_dev_shm(pid)}
        killed_at = time.monotonic()
        group.kill(1)
        outcomes = group.join(timeout_s=20)
        assert [o.kind for o in outcomes] == ["ok", "died", "ok"]
        inodes = set()
        for outcome in (outcomes[0], outcomes[2]):
            text, when, inode = outcome.value
            assert "rank 1 (process" in text and "has ended" in text, text
            assert when - killed_at < 4
            inodes.add(inode)
    assert not inodes & memfd_inodes(), "no process holds the memory"
    left = {name for name in mapped if Path(name).exists()}
    assert not left, "nothing of theirs in /dev/shm"


def files_in_dev_shm(pid: int) -> set[str]:
    """What a process has mapped or open there; other processes of this machine have files too."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(line.split(maxsplit=5)[5])
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(fd))
    return {name for name in found if name.startswith("/dev/shm/")}


def memfd_inodes() -> set[int]:
    """Inodes of all memfds that any process has open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if "/memfd:shardwise" in line:
                    found.add(int(line.split()[4]))
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:shardwise" in os.readlink(fd):
                        found.add(os.stat(fd).st_ino)
    return found


# -- memory
@on_ranks(2, 3)
def test_nothing_grows_over_many_steps(rank: int, world: int) -> None:
    """Buckets of different sizes, reduced in different orders:

    pages and slots settle within a few steps.
    """
    transport = SharedMemoryTransport(*new_axes(rank, world))
    before, sizes = held_bytes(transport), (1000, 70_000, 30_000, 5, 120_000)
    buckets = [bucket_of(transport, n, world, f"u[{n}]") for n in sizes]
    same, held = random.Random(2), []
    orders = [same.sample(range(5), 5) for _ in range(world)]
    for step in range(200):
        transport.enter(at(step, "backward"))
        pending = [reduce_ones(transport, buckets[i], float(rank)) for i in orders[rank]]
        assert transport.missing(at(step, "backward")) == []
        for handle, out in pending:
            handle.wait()
            assert out[0] == sum(range(world)) or out.numel() == 1
        transport.leave(at(step, "backward"))
        slots = transport._mail.pool.slots
        held.append(len(slots))
    assert held[20] == held[-1] <= 5
    largest = max(slot.capacity_bytes for slot in slots)
    assert largest < (world - 1) * 4 * (120_000 / world + 1000), "the largest reduction's size"
    shards = sum(bucket.layout.shard_bytes for bucket in buckets)
    assert held_bytes(transport) - before <= shards + len(slots) * largest + MIB


@on_ranks(2, 3)
def test_opposite_orders_make_the_pool_grow_once(rank: int, world: int) -> None:
    """All slots are full of what nobody else has posted:

    growing is the only way on, and it is kept.
    """
    transport = SharedMemoryTransport(*new_axes(rank, world))
    buckets = [bucket_of(transport, 1000, world, f"u[{i}]") for i in range(9)]
    slots, started = transport._mail.pool.slots, time.monotonic()
    for step in range(10):
        transport.enter(at(step, "backward"))
        ordered = buckets if rank else buckets[::-1]
        pending = [reduce_ones(transport, bucket) for bucket in ordered]
        for handle, out in pending:
            handle.wait()
            assert out[0] == world
        transport.leave(at(step, "backward"))
    num_slots: list[int] = [0] * world
    dist.all_gather_object(num_slots, len(slots))
    assert 3 < max(num_slots) <= 9
    assert time.monotonic() - started < 10


@on_ranks(2)
def test_a_slow_reader_is_waited_for(rank: int, world: int) -> None:
    """A peer that computes is no reason to grow."""
    transport = SharedMemoryTransport(*new_axes(rank, world))
    buckets = [bucket_of(transport, 1000, world, f"u[{i}]") for i in range(9)]
    for step in range(5):
        transport.enter(at(step, "backward"))
        for bucket in buckets:
            if rank == step % 2:
                time.sleep(0.02)
            reduce_ones(transport, bucket)
        transport.leave(at(step, "backward"))
    assert len(transport._mail.pool.slots) == 3


@on_ranks(2)
def test_plans_go_with_what_they_write_to(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    bucket = bucket_of(transport, 1000, world)
    transport.enter(at(0))
    for _ in range(5):
        gather(transport, bucket)
    assert len(bucket.plans) == 0
    out = torch.empty(bucket.layout.full_numel)
    for value in range(3):
        out.untyped_storage().resize_(out.numel() * 4)
        out.fill_(77)
        transport.gather(bucket, bucket.buffer, out)
        assert (out[:1000] == 0).all(), value
        out.untyped_storage().resize_(0)
    assert len(bucket.plans) == 1
    transport.leave(at(0))


@on_ranks(2)
def test_a_bucket_gives_its_memory_back_with_its_last_tensor(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    before = held_bytes(transport)
    for _ in range(5):
        bucket = bucket_of(transport, 4 * MIB, world)
        bucket.buffer.fill_(1.0)
        transport.enter(at(0))
        gather(transport, bucket)
        transport.leave(at(0))
        assert held_bytes(transport) - before >= 8 * MIB
        view = bucket.buffer[5:9]
        del bucket
        gc.collect()
        assert view.sum() == 4.0, "a parameter keeps the buffer"
        dist.barrier()
        pid = os.fork()
        if pid == 0:  # a data loader's worker drops its copy of the model
            del view
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        assert view.sum() == 4.0
        dist.barrier()
        assert transport._domain.controls[1 - rank].mapping.owner_lives(), "the child was no rank"
        del view
        gc.collect()
        assert held_bytes(transport) - before < MIB


@on_ranks(2)
def test_a_forked_child_cannot_be_a_rank(rank: int, world: int) -> None:
    transport = transport_of(rank, world)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(TransportError):
            transport.enter(at(0))
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


# -- other ways in, and none
def refuse(*_: object) -> dict[int, int]:
    raise PermissionError("closed")


def new_axes(rank: int, world: int):
    """Axes of ranks whose domain is forgotten, so that access is opened anew."""
    kept("domains").clear()
    axis = shard_axis(rank, world)
    return type(axis)("shard", axis.ranks, rank, dist.new_group()), alone("replicate", rank)


@on_ranks(3)
def test_descriptors_come_over_a_socket_where_proc_is_closed(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access_module, "_OPENERS", (refuse, access_module._open_by_socket))
        transport = SharedMemoryTransport(*new_axes(rank, world))
    bucket = bucket_of(transport, 3000, world)
    bucket.buffer.fill_(rank)
    transport.enter(at(0))
    assert gather(transport, bucket)[:3000].tolist() == [
        float(r) for r in range(3) for _ in range(1000)
    ]
    transport.leave(at(0))


@on_ranks(2)
def test_all_ranks_give_the_same_reason(rank: int, world: int) -> None:
    """Only rank 1 cannot open its peer's memory; both then use c10d."""
    axes = new_axes(rank, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access_module, "_SOCKET_LIMIT_S", 0.5)
        if rank == 1:
            patch.setattr(access_module, "_OPENERS", (refuse, refuse))
        reason = shared_memory_reason(axes)
    assert reason == shared_memory_reason(axes), "kept, without another exchange"
    assert reason is not None and "rank 1: cannot open its peers' memory" in reason
    with pytest.raises(TransportError, match="Use 'auto' or 'c10d'"):
        SharedMemoryTransport(*axes)


@on_ranks(2)
def test_other_hosts_and_machines_are_refused(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("platform.machine", lambda: "riscv64")
        assert "rank 1: the memory order of riscv64" in (
            shared_memory_reason(new_axes(rank, world)) or ""
        )
    with pytest.MonkeyPatch.context() as patch:
        boot_id = Path("/proc/version" if rank else "/proc/sys/kernel/random/boot_id")
        patch.setattr(access_module, "_BOOT_ID", boot_id)
        assert "several hosts" in (shared_memory_reason(new_axes(rank, world)) or "")
    assert shared_memory_reason((alone("shard", rank), alone("replicate", rank))) is not None


@on_ranks(4)
def test_models_on_one_mesh_share_a_domain(rank: int, world: int) -> None:
    axes = hybrid_axes(rank, 2, 2)
    assert domain_of(*axes) is domain_of(*axes)
    assert SharedMemoryTransport(*axes)._mail is SharedMemoryTransport(*axes)._mail
    domain = domain_of(*axes)
    assert not isinstance(domain, str) and domain.ranks == (0, 1, 2, 3)


@on_ranks(2)
def test_fences_routed_through_the_kernel(rank: int, world: int) -> None:
    """What aarch64 does, executed here."""
    transport = SharedMemoryTransport(*new_axes(rank, world))
    domain = transport._domain
    domain.order = MemoryOrder(domain.doorbell, routed=True)
    bucket = bucket_of(transport, 1000, world)
    for step in range(100):
        bucket.buffer.fill_(step)
        transport.enter(at(step, "backward"))
        assert (gather(transport, bucket)[:1000] == step).all()
        handle, out = reduce_ones(transport, bucket)
        handle.wait()
        assert out[0] == 2
        transport.leave(at(step, "backward"))
