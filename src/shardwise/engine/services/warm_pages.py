"""Keep the pages of freed memory, so that the next step's buffers need not be faulted in again.

A CPU rank frees and takes anew, in every step, the gathered parameters of each unit, gradients and
activations. By default glibc maps large blocks one by one and unmaps them when they are freed; each
reuse then costs a page fault for every 4 KiB (28 MB: 12.0 ms; into pages that are there 1.4 ms).
Raising two thresholds of malloc keeps freed memory in the heap, where the next allocation finds it.

    benefit   50M decoder, 2 ranks, fp32, beside `comm.blocks`: 13,000 to 54,000 page faults of a
              rank's step become 0 to 900; 936 ms of its processor time 895 (medians, busy machine)
    cost      what the process has freed stays with it (up to 2 GiB at the heap's end): memory falls
              less after a peak. The peak itself stayed where it was (1,704 MiB against 1,697)

It is a setting of the whole process, made once, when the first unit on CPU is built.
SHARDWISE_WARM_PAGES=0 switches it off. Settings of malloc that the user made through the
environment are left alone, and so are other C libraries.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

import torch

VARIABLE = "SHARDWISE_WARM_PAGES"
_USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
)

# malloc.h. A threshold of mapping at 1 GiB: blocks beyond it are rare, and worth giving back.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 2**31 - 1, 2**30


def keep_pages_warm(device: torch.device) -> bool:
    """Raise malloc's thresholds if `device` is the CPU. True when they are raised; later calls do
    nothing.
    """
    return device.type == "cpu" and _raise_thresholds()


@functools.cache
def _raise_thresholds() -> bool:
    if os.environ.get(VARIABLE, "1") == "0" or platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in _USERS_OWN):
        return False
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
