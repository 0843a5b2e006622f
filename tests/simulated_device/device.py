"""Makes the device known to torch: `torch.device("sim")`, the module `torch.sim`, and the backend
"simccl" of torch.distributed. Names as in `torch.cuda`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack

from simulated_device.build import native

DEVICE = "sim"
BACKEND = "simccl"


@functools.cache
def register() -> ModuleType:
    """Register device, module and backend; once in a process. Returns `torch.sim`."""
    torch.utils.rename_privateuse1_backend(DEVICE)
    _native = native()
    module = _module(_native)
    torch._register_device_module(DEVICE, module)
    sys.modules[f"torch.{DEVICE}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _export_by_dlpack()
    if dist.is_available():

        def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
            return _native.make_process_group(dist.ProcessGroupGloo(store, rank, size, timeout))

        dist.Backend.register_backend(BACKEND, make, devices=[DEVICE])
    # Threads of streams must not run torch's kernels while the process takes torch down.
    atexit.register(_native.drain_all)
    return module


def _export_by_dlpack() -> None:
    """torch asks for the type "privateuse1", which no tensor has once the device has a name."""
    before = torch.Tensor.__dlpack_device__

    def dlpack_device(self: torch.Tensor) -> Any:
        if self.device.type != DEVICE:
            return before(self)
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, 0

    torch.Tensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]


class Stream(torch.Stream):
    """A stream; `torch.sim.Stream()` makes one."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
        if "stream_id" in given:
            return super().__new__(cls, **given)
        _check_index(device)
        return super().__new__(cls, device=torch.device(DEVICE, 0), priority=priority)


class _Device:
    """`with torch.sim.device(0)`: there is one, so nothing changes."""

    def __init__(self, device: Any) -> None:
        _check_index(device)

    def __enter__(self) -> None:
        """The device is current as it was."""

    def __exit__(self, *_: object) -> None:
        """And stays so."""


def _check_index(device: Any) -> None:
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if index not in (None, 0):
        raise ValueError(f"a process has one simulated device, index 0, got {device}")


def _module(native: ModuleType) -> ModuleType:
    module: Any = ModuleType(f"torch.{DEVICE}", "The simulated device, in the words of torch.cuda.")

    @contextlib.contextmanager
    def stream(of: torch.Stream | None) -> Iterator[None]:
        before = native.current_stream() if of is None else set_stream(of)
        try:
            yield
        finally:
            native.exchange_current_stream(before)

    def set_stream(of: torch.Stream) -> int:
        return native.exchange_current_stream(of.stream_id)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def default_stream(device: Any = None) -> torch.Stream:
        kind = current_stream().device_type
        return Stream(stream_id=0, device_index=0, device_type=kind)

    def generator() -> torch.Generator:
        return default_generators[0]

    def manual_seed(seed: int) -> None:
        generator().manual_seed(seed)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return generator().get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generator().set_state(state)

    def memory(which: int) -> Any:
        return lambda device=None: native.all_pools()[which]

    default_generators = [native.default_generator()]
    in_bad_fork = [False]
    os.register_at_fork(after_in_child=lambda: in_bad_fork.__setitem__(0, True))
    module.__dict__.update(
        Stream=Stream,
        Event=lambda *_, **__: torch.Event(DEVICE),
        stream=stream,
        set_stream=set_stream,
        current_stream=current_stream,
        default_stream=default_stream,
        device=_Device,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_check_index,
        get_device_name=lambda device=None: "simulated device",
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # torch.utils.checkpoint asks before it keeps the generator's state
        _is_in_bad_fork=lambda: in_bad_fork[0],
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        default_generators=default_generators,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        empty_cache=lambda: None,
        memory_allocated=memory(0),
        max_memory_allocated=memory(1),
        memory_reserved=memory(2),
    )
    return module
