"""A simulated accelerator on CPU memory, and what it finds out about programs that run on it.

    import simulated_device

    simulated_device.load()                      # torch knows torch.device("sim") and torch.sim
    torch.distributed.init_process_group("cpu:gloo,sim:simccl", ...)
    ...                                          # the program, as on any accelerator
    found = simulated_device.report()
    assert not found.races, found.races

`why_not()` says what is missing where it cannot be built. docs/accelerators.md has the whole story:
what the device does, what it proves, and what it cannot know.
"""

from simulated_device.build import why_not
from simulated_device.device import BACKEND, DEVICE
from simulated_device.device import register as load
from simulated_device.report import PoolSize, Report, clear, delay, name_stream, report, slow_down

__all__ = [
    "BACKEND",
    "DEVICE",
    "PoolSize",
    "Report",
    "clear",
    "delay",
    "load",
    "name_stream",
    "report",
    "slow_down",
    "why_not",
]
