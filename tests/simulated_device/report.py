"""What the device has seen since it was loaded, or since the last `clear`; and how slow it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from simulated_device.build import native


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Bytes of one stream's pool, or of all. A peak of all is below the sum of their peaks."""

    allocated: int
    peak_allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Report:
    """races: pairs of accesses that nothing orders, and memory that may be reused too early.

    launches: operators, copies and collectives by stream and name, as "gather copy_". host_waits:
    each time the host had to wait for the device, by reason and place. collectives: in the order of
    issue, with the bytes of each tensor and its address modulo 16.
    """

    races: list[str]
    launches: dict[str, int]
    host_waits: dict[str, int]
    record_streams: int
    deferred_frees: int
    collectives: list[str]
    pools: dict[str, PoolSize]
    total: PoolSize

    @property
    def num_host_waits(self) -> int:
        return sum(self.host_waits.values())

    def launches_on(self, stream: str) -> dict[str, int]:
        """Launches on one stream, by operator."""
        prefix = f"{stream} "
        return {
            name.removeprefix(prefix): count
            for name, count in self.launches.items()
            if name.startswith(prefix)
        }


def report() -> Report:
    """Ask for all of it. The device goes on meanwhile; synchronize first for a whole step."""
    device = native()
    other = device.other_counts()
    return Report(
        races=device.races(),
        launches=device.launches(),
        host_waits=device.host_waits(),
        record_streams=other.get("record_stream", 0),
        deferred_frees=other.get("frees deferred by record_stream", 0),
        collectives=device.collectives(),
        pools={name: PoolSize(*size) for name, size in device.pools().items()},
        total=PoolSize(*device.all_pools()),
    )


def clear() -> None:
    """Forget races and counts; peaks begin at what is allocated now."""
    native().clear_races()
    native().clear_counts()


def slow_down(highest_us: int, seed: int) -> None:
    """Hold back each piece of work on each stream by 0 to this many microseconds, drawn by seed."""
    native().set_delays(highest_us, seed)


def delay(stream: torch.Stream, lowest_us: int, highest_us: int) -> None:
    """Hold back work on one stream."""
    native().set_delay(stream.stream_id, lowest_us, highest_us)


def name_stream(stream: torch.Stream, name: str) -> None:
    """What reports call the stream."""
    native().set_name(stream.stream_id, name)
