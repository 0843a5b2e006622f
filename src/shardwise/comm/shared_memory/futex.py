"""Sleeping and waking between processes, and memory order, with nothing but futex(2).

A `Doorbell` is one 32-bit word that all ranks of a domain share. Whoever has announced something
rings it; whoever finds nothing to do sleeps on the value that it read *before* it looked:

    announcer   1 store the data          waiter   1 read the doorbell -> seen
                2 store the flag                   2 look at the flags; act when one is up
                3 ring: doorbell += 1              3 sleep unless the doorbell differs from `seen`

The kernel compares and queues under one lock, so no ring between 1 and 3 is lost (this is the
event count of D. Reed and R. Kanodia, 1979; the futex protocol is U. Drepper's "Futexes are
tricky"). `ring` is FUTEX_WAKE_OP: the kernel's own atomic add, so any rank may ring.

Memory order. Data goes before its flag, and the flag is read before the data.

* x86-64 keeps stores in order and loads in order (total store order), so plain loads and stores do.
  Non-temporal stores, which memcpy uses for large copies, are fenced by memcpy itself (`sfence`).
* aarch64 reorders both. There `order()` stands between data and flag on the writing side and
  between flag and data on the reading side: a FUTEX_WAKE_OP on a private word, which the kernel
  executes as an atomic read-modify-write with a full barrier (`dmb ish`, or its LSE form) on the
  calling CPU. A system call alone would be no barrier.
* anything else: not supported, `unsupported()` says so and c10d takes over.

The interpreter cannot reorder: each load and store of a flag is a call of its own for the C
compiler. `memoryview.cast("Q")` moves an aligned item with a constant-size memcpy, which compilers
emit as one 8-byte move, and aligned 8-byte moves are atomic on both architectures.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_FUTEX_WAIT = 0
_FUTEX_WAKE_OP = 5
_ADD_ONE = (1 << 28) | (1 << 12)  # *word += 1; compare and second wake unused
_EVERYBODY = 2**31 - 1
_SYSCALL = {"x86_64": 202, "aarch64": 98}
_TOTAL_STORE_ORDER = ("x86_64",)

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def unsupported() -> str | None:
    """Why fences cannot be built on this machine, None where they can."""
    machine = platform.machine()
    if not sys.platform.startswith("linux"):
        return f"shared-memory fences need Linux futexes, this is {sys.platform}"
    if machine not in _SYSCALL or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return f"the memory order of {machine} is not known to shardwise"
    return None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbell:
    """The futex word at `address`; `word` reads it."""

    __slots__ = ("_address", "_index", "_ring_arguments", "_wait_number", "_words")

    def __init__(self, words: memoryview, index: int, address: int) -> None:
        # The upper half of the 8-byte word stays zero, so reading all of it gives the futex value.
        self._words, self._index = words, index
        number = ctypes.c_long(_SYSCALL.get(platform.machine(), -1))
        self._address = ctypes.c_void_p(address)
        self._wait_number = number
        self._ring_arguments = (
            number,
            self._address,
            ctypes.c_int(_FUTEX_WAKE_OP),
            ctypes.c_int(_EVERYBODY),
            ctypes.c_void_p(0),
            self._address,
            ctypes.c_uint32(_ADD_ONE),
        )

    @property
    def value(self) -> int:
        return self._words[self._index]

    def ring(self) -> None:
        """Add one and wake all sleepers; a full barrier on the way."""
        if _syscall(*self._ring_arguments) < 0:
            code = ctypes.get_errno()
            raise OSError(code, "FUTEX_WAKE_OP failed")

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until a ring, a signal or the time limit;

        not at all when the value is not `seen`.
        """
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _syscall(
            self._wait_number,
            self._address,
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(seen & 0xFFFFFFFF),
            ctypes.byref(limit),
            ctypes.c_void_p(0),
            ctypes.c_int(0),
        )


class MemoryOrder:
    """`order()` between data and flag;

    see the module's docstring. `routed=True` forces the barrier.
    """

    __slots__ = ("_fence",)

    def __init__(self, fence: Doorbell, *, routed: bool | None = None) -> None:
        if routed is None:
            routed = platform.machine() not in _TOTAL_STORE_ORDER
        self._fence = fence if routed else None

    def __call__(self) -> None:
        if self._fence is not None:
            self._fence.ring()
