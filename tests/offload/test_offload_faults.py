"""What disks and people do to the files of an optimizer: no state that was corrupted is accepted.

After each fault either the numbers are those of a run without it, or the optimizer refuses: a
checkpoint cannot be written any more, the last one is whole, and from it the run reaches the
numbers of a run without faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw
from ranks import on_ranks, spawn_ranks
from shardwise.errors import CheckpointError, OffloadError, ShardwiseError
from shardwise.offload import OffloadedOptimizer, files, stores
from shardwise.offload.files import Calls

CHUNK = 2**16
STEPS, SAVED = 6, 3


class Faulty(Calls):
    """Does what `fault` says at the call of that number, counted over reads or over writes."""

    def __init__(self, on: str, at: int, fault: Callable[..., Any], times: int = 1) -> None:
        self._on, self._at, self._fault, self._times = on, at, fault, times
        self.num_calls = 0
        self.num_faults = 0

    def _is_due(self, what: str) -> bool:
        if what != self._on:
            return False
        self.num_calls += 1
        due = self._at <= self.num_calls < self._at + self._times
        self.num_faults += due
        return due

    def pread(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if self._is_due("read"):
            return self._fault(super().pread, descriptor, memory, offset)
        return super().pread(descriptor, memory, offset)

    def pwrite(self, descriptor: int, memory: memoryview, offset: int) -> int:
        if self._is_due("write"):
            return self._fault(super().pwrite, descriptor, memory, offset)
        return super().pwrite(descriptor, memory, offset)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        if self._is_due("reserve"):
            self._fault(super().reserve, descriptor, size_bytes)
        super().reserve(descriptor, size_bytes)


class Buffered(Faulty):
    """On a file system without direct I/O."""

    def go_direct(self, descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def raises(number: int) -> Callable[..., int]:
    def fault(call: Any, *_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fault


def moves(count: Callable[[int], int]) -> Callable[..., int]:
    """Only a part is read or written."""

    def fault(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
        wanted = count(len(memory))
        # What direct I/O moves in fact are whole sectors; the rest is as if it had not been.
        moved = call(descriptor, memory[: -(-wanted // 4096) * 4096], offset) if wanted else 0
        return min(moved, wanted)

    return fault


def says_written(_call: Any, _descriptor: int, memory: memoryview, _offset: int) -> int:
    return len(memory)


def torn(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
    call(descriptor, memory[: len(memory) // 2 // 4096 * 4096], offset)
    return len(memory)


def misplaced(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
    size = len(memory)
    return call(descriptor, memory, offset - size if offset >= size else offset + size)


def flips(byte: int) -> Callable[..., int]:
    def fault(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
        moved = call(descriptor, memory, offset)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + byte % len(memory)
        ctypes.c_ubyte.from_address(at).value ^= 16
        return moved

    return fault


def flips_written(byte: int) -> Callable[..., int]:
    """The disk keeps another byte than it was given; memory is as it was."""

    def fault(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
        changed = files.aligned(len(memory))
        changed.copy_(torch.frombuffer(memory, dtype=torch.uint8))
        changed[byte % len(memory)] ^= 16
        return call(descriptor, stores.bytes_of(changed), offset)

    return fault


# -- runs ----------------------------------------------------------------------------------------
def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def optimizer_of(model: nn.Module, folder: Path, calls: Calls | None) -> OffloadedOptimizer:
    return OffloadedOptimizer(
        optim.AdamW(model.parameters(), lr=1e-2),
        state="nvme",
        directory=folder / "offload",
        chunk_bytes=CHUNK,
        read_ahead=1,
        write_behind=1,
        calls=calls,
    )


def run(model: nn.Module, optimizer: Any, first: int, last: int, between: Any = None) -> None:
    for step in range(first, last + 1):
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(step)


def expected() -> list[torch.Tensor]:
    model = model_of()
    run(model, optim.AdamW(model.parameters(), lr=1e-2), 1, STEPS)
    return [p.detach().clone() for p in model.parameters()]


def whole_run(folder: Path, calls: Calls | None, between: Any = None) -> list[torch.Tensor]:
    """A checkpoint on the way, as a job writes it; an error where something was noticed."""
    model = model_of()
    optimizer = optimizer_of(model, folder, calls)
    manager = sw.CheckpointManager(folder / "checkpoints")
    try:
        run(model, optimizer, 1, SAVED, between)
        manager.save(SAVED, model, optimizer)
        run(model, optimizer, SAVED + 1, STEPS, between)
        manager.save(STEPS, model, optimizer)
    except OffloadError as error:
        if "reserved" not in str(error):  # nothing was stepped
            refuses(model, optimizer, manager)
        raise
    finally:
        optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def refuses(model: nn.Module, optimizer: OffloadedOptimizer, manager: Any) -> None:
    """No step, no state dict, no checkpoint: what there is may be half a step."""
    before = sorted(p.name for p in manager.directory.glob("*"))
    with pytest.raises(OffloadError, match="load the last checkpoint"):
        run(model, optimizer, 1, 1)
    with pytest.raises(OffloadError, match="load the last checkpoint"):
        optimizer.state_dict()
    with pytest.raises(ShardwiseError, match="load the last checkpoint"):
        manager.save(9, model, optimizer)
    assert sorted(p.name for p in manager.directory.glob("*")) == before


def goes_on(folder: Path, calls: Calls | None = None) -> list[torch.Tensor]:
    """A new run from the last checkpoint, or from zero."""
    model = model_of()
    optimizer = optimizer_of(model, folder, calls)
    manager = sw.CheckpointManager(folder / "checkpoints")
    found, passed_over = manager.latest()
    assert not passed_over
    step = manager.load(found, model, optimizer).step if found is not None else 0
    run(model, optimizer, step + 1, STEPS)
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def equal(found: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected(), strict=True))


# -- faults that are noticed ---------------------------------------------------------------------
# The numbers: three chunks of the model's state, written once a step, read once from step 2 on.
NOTICED: dict[str, tuple[Any, str]] = {
    "write error in the first step": (("write", 1, raises(errno.EIO)), "cannot be written at byte"),
    "write error in the middle": (("write", 8, raises(errno.EIO)), "cannot be written at byte"),
    "write error in the last chunk": (("write", 18, raises(errno.EIO)), "cannot be written at"),
    "disk full while writing": (("write", 5, raises(errno.ENOSPC)), "No space left .* free some"),
    "quota used up while writing": (("write", 11, raises(errno.EDQUOT)), "free some space there"),
    "disk full at the start": (("reserve", 1, raises(errno.ENOSPC)), "cannot be reserved: No spa"),
    "read error": (("read", 2, raises(errno.EIO)), "cannot be read at byte"),
    "read error later": (("read", 10, raises(errno.EIO)), "cannot be read at byte"),
    "writes nothing": (("write", 4, moves(lambda n: 0), 9), "only 0 of .* could be written"),
    "writes less than a page": (("write", 4, moves(lambda n: 100), 9), "only 100 of .* written"),
    "reads less than a page": (("read", 4, moves(lambda n: 100), 9), "only 100 of .* read"),
    "reads nothing": (("read", 3, moves(lambda n: 0)), "ends at byte .* somebody has cut it"),
    "flipped byte of the header, read": (("read", 4, flips(3)), "has no header of this run"),
    "flipped byte of a header's sum": (("read", 4, flips(41)), "has other checksums than were"),
    "flipped byte of a slot, read": (("read", 5, flips(5000)), "has checksum .* of 'exp_avg"),
    "flipped byte of a slot, written": (("write", 6, flips_written(9000)), "has checksum .* of"),
    "flipped byte of the count": (("write", 9, flips_written(33)), "written .* times, 3 are exp"),
    "lost write": (("write", 7, says_written), "write was lost|has checksum"),
    "lost first write": (("write", 2, says_written), "has no header of this run|has checksum"),
    "torn write": (("write", 9, torn), "has checksum .* of 'exp_avg"),
    "write at another place": (("write", 8, misplaced), "is chunk 1|a write was lost|checksum"),
}


@pytest.mark.parametrize("fault", NOTICED)
def test_noticed(fault: str, tmp_path: Path) -> None:
    given, text = NOTICED[fault]
    calls = Faulty(*given)
    with pytest.raises((OffloadError, CheckpointError), match=text) as raised:
        whole_run(tmp_path, calls)
    assert "\n" not in str(raised.value) and "rank_00000.state" in str(raised.value)
    assert calls.num_faults and (
        fault == "disk full at the start" or "checkpoint" in str(raised.value)
    )
    assert not list((tmp_path / "offload").iterdir())
    assert equal(goes_on(tmp_path))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def zeros(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


class Swapper:
    """Puts back what stood in the file a step before: every checksum in it is right."""

    def __init__(self) -> None:
        self.before = b""

    def __call__(self, path: Path) -> None:
        with path.open("r+b") as file:
            now = file.read()
            if self.before:
                file.seek(0)
                file.write(self.before)
            self.before = now


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (cut, "ends at byte|has checksum|has no header"),
        (zeros, "has checksum"),
        (Swapper(), "a write was lost"),
    ],
    ids=["cut", "zeros", "an older state"],
)
def test_somebody_changes_the_file(harm: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "offload" / "rank_00000.state"

    def between(step: int) -> None:
        if step > SAVED:
            harm(path)

    with pytest.raises(OffloadError, match=text):
        whole_run(tmp_path, Buffered("none", 0, raises(0)), between)
    assert equal(goes_on(tmp_path))


# -- faults that do not matter -------------------------------------------------------------------
HARMLESS: dict[str, Any] = {
    "short write of pages": ("write", 3, moves(lambda n: n // 2 // 4096 * 4096 or n), 6),
    "short write inside of a page": ("write", 3, moves(lambda n: max(5000, n - 100)), 3),
    "short read of pages": ("read", 3, moves(lambda n: n // 3 // 4096 * 4096 or n), 9),
    "short read inside of a page": ("read", 3, moves(lambda n: max(5000, n - 100)), 3),
    "interrupted read": ("read", 4, raises(errno.EINTR), 3),
    "interrupted write": ("write", 4, raises(errno.EINTR), 3),
    "direct calls are refused": ("write", 1, raises(errno.EINVAL)),
    "space cannot be reserved here": ("reserve", 1, raises(errno.EOPNOTSUPP)),
}


@pytest.mark.parametrize("kind", [Faulty, Buffered])
@pytest.mark.parametrize("fault", HARMLESS)
def test_harmless(fault: str, kind: type[Faulty], tmp_path: Path) -> None:
    if fault == "direct calls are refused" and kind is Buffered:
        return
    calls = kind(*HARMLESS[fault])
    assert equal(whole_run(tmp_path, calls))
    assert calls.num_faults


def test_without_direct_io_no_page_is_left_in_the_cache(tmp_path: Path) -> None:
    if subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path]).strip() == b"tmpfs":
        pytest.skip(reason="files of tmpfs are in memory, whatever is done with them")
    model = model_of()
    optimizer = optimizer_of(model, tmp_path, Buffered("none", 0, raises(0)))
    run(model, optimizer, 1, 2)
    optimizer.flush()
    path = tmp_path / "offload" / "rank_00000.state"
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as file:
        there = libc.mmap(None, ctypes.c_size_t(size), 1, 1, file.fileno(), ctypes.c_long(0))
        pages = (ctypes.c_ubyte * (-(-size // 4096)))()
        assert libc.mincore(ctypes.c_void_p(there), ctypes.c_size_t(size), pages) == 0
        libc.munmap(ctypes.c_void_p(there), ctypes.c_size_t(size))
    assert size > 2 * 4 * 16_000 and sum(page & 1 for page in pages) == 0
    optimizer.close()


# -- places --------------------------------------------------------------------------------------
def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.2)
    model = model_of()
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "offload").mkdir(parents=True)
    theirs = tmp_path / "taken" / "offload" / "rank_00000.state"
    theirs.write_text("the state of California")
    (tmp_path / "link" / "offload").mkdir(parents=True)
    (tmp_path / "link" / "offload" / "rank_00000.state").symlink_to(theirs)
    for folder, text in [
        ("file", "cannot be made: Not a directory; name a directory on a local disk"),
        ("taken", "is no working file of an optimizer's state and would be overwritten"),
        ("link", "cannot be made: Too many levels of symbolic links"),
    ]:
        with pytest.raises(OffloadError, match=text):
            optimizer_of(model, tmp_path / folder, None).reserve()
    assert theirs.read_text() == "the state of California"
    first = optimizer_of(model, tmp_path, None)
    first.reserve()
    with pytest.raises(OffloadError, match="another job, or another optimizer of this one"):
        optimizer_of(model, tmp_path, None).reserve()
    run(model, first, 1, 2)
    first.close()
    optimizer_of(model, tmp_path, None).reserve()


def test_a_failed_step_is_over_with_a_checkpoint(tmp_path: Path) -> None:
    """In the same process: loading puts weights and state right."""
    model = model_of()
    optimizer = optimizer_of(model, tmp_path, Faulty("write", 13, raises(errno.EIO)))
    manager = sw.CheckpointManager(tmp_path / "checkpoints")
    run(model, optimizer, 1, SAVED)
    manager.save(SAVED, model, optimizer)
    with pytest.raises(OffloadError):
        run(model, optimizer, SAVED + 1, STEPS)
    found, _ = manager.latest()
    assert found is not None
    model.zero_grad()
    step = manager.load(found, model, optimizer).step
    run(model, optimizer, step + 1, STEPS)
    optimizer.close()
    assert equal([p.detach() for p in model.parameters()])


@on_ranks(2)
def test_one_rank_fails_and_no_checkpoint_is_written(rank: int, world: int, tmp_path: Path) -> None:
    model = sw.fully_shard(model_of())
    calls = Faulty("write", 2, raises(errno.ENOSPC)) if rank == 1 else None
    optimizer = optimizer_of(model, tmp_path, calls)
    with contextlib.suppress(OffloadError):
        run(model, optimizer, 1, 1)
        optimizer.flush()
    with pytest.raises(ShardwiseError, match="No space left"):
        sw.CheckpointManager(tmp_path / "checkpoints").save(1, model, optimizer)
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    optimizer.close()


# -- kill -9 -------------------------------------------------------------------------------------
def killed_run(rank: int, world: int, folder: Path, at: int, share: float) -> None:
    def dies(call: Any, descriptor: int, memory: memoryview, offset: int) -> int:
        call(descriptor, memory[: int(len(memory) * share) // 4096 * 4096], offset)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    whole_run(folder, Faulty("write", at, dies))


@pytest.mark.parametrize(
    ("at", "share"),
    [
        (13, 0.5),
        *(
            pytest.param(at, share, marks=pytest.mark.long)
            for at in (1, 2, 6, 9, 10, 12, 16, 18)
            for share in (0.0, 0.5, 1.0)
        ),
    ],
)
def test_kill_in_write_behind(at: int, share: float, tmp_path: Path) -> None:
    """The file that is left behind is no state of anything, and the lock went with the process."""
    with spawn_ranks(1, killed_run, tmp_path, at, share) as group:
        (outcome,) = group.join()
    assert outcome.kind == "died", outcome
    assert (tmp_path / "offload" / "rank_00000.state").stat().st_size
    assert (tmp_path / "checkpoints" / "step_00000003").exists() == (at > 9)
    assert equal(goes_on(tmp_path))
    assert not list((tmp_path / "offload").iterdir())
