"""The times of `shardwise plan`: of devices by name, by shares of their peak; of CPU ranks whose
machine has a hardware file, by what was measured on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.plan.hardware import DEVICES, device_named, parse_link
from shardwise.units import full_name

if TYPE_CHECKING:
    from torch import nn

    from shardwise.plan.measured import Rates
    from shardwise.plan.model import PlannedModel
    from shardwise.plan.simulate import StepTime
    from shardwise.plan.speed import Speed
    from shardwise.train.config import Config
    from shardwise.train.planned import Traces

CONFIRMED = (
    "times: by shares of the peak that published runs on H100 and H200 reached eagerly "
    "(docs/plan.md); no run of this job has confirmed them"
)
MEASURED = "times: by what {ranks} ranks of {threads} side by side reached on the machine of {file}"


class Clock:
    """Of one call of `plan`; without a device by name and without a hardware file of CPU ranks it
    knows nothing.
    """

    def __init__(self, own: dict[str, str], per_host: int) -> None:
        self._file = Path(own.get("hardware", ""))
        self.speed = _speed(own, per_host)
        self._rates = _rates(own) if self.speed is None else None
        self._why: list[str] = []

    def of_job(
        self, model: nn.Module, traces: Traces, plan: PlannedModel, config: Config, ranks: int
    ) -> StepTime | None:
        """One step of a job, whose shards travel as they are and lie on the device."""
        if self._rates is not None:
            from shardwise.train.planned_time import time_on_ranks

            found = time_on_ranks(plan, traces, config, ranks, self._rates)
            if not isinstance(found, str):
                return found
            self._why.append(found)
        elif self.speed is not None:
            return self._of_device(model, plan, config, ranks)
        return None

    def _of_device(
        self, model: nn.Module, plan: PlannedModel, config: Config, ranks: int
    ) -> StepTime | None:
        from shardwise.train.flops import Flops

        if not hasattr(self, "_flops"):
            self._flops = Flops(model, config)
        counted_flops = self._flops.of(plan)
        if counted_flops is None:
            self._why.append("no time: this model's forward tells nothing on meta")
            return None
        micro = config.train.micro_batch
        batches = max(1, config.train.global_batch // (micro * ranks))
        forward = [micro * each for each in counted_flops]
        recomputes = {"none": 0.0, "full": 1.0}.get(config.shard.activation_checkpointing, 0.5)
        return self.of_flops(plan, forward, config.shard.param_dtype, recomputes, batches)

    def of_flops(
        self,
        plan: PlannedModel,
        forward: Sequence[float],
        dtype: str,
        recomputes: float = 0.0,
        micro_batches: int = 1,
    ) -> StepTime | None:
        """`forward`: operations of each unit's forward of one micro-batch."""
        if self.speed is None:
            if self._rates is not None:
                self._why.append("no time: CPU ranks have one for a job, not for a number alone")
            return None
        from shardwise.plan.speed import Work, step_time

        work = Work(forward, recomputes=recomputes, micro_batches=micro_batches)
        return step_time(plan, work, replace(self.speed, dtype=full_name(dtype)))

    def notes(self, *, has_times: bool) -> list[str]:
        """What its times are worth, or why there are none."""
        if has_times and self._rates is not None:
            from shardwise.units import counted

            rates = self._rates
            threads = counted(rates.threads, "thread")
            return [MEASURED.format(ranks=rates.ranks, threads=threads, file=self._file)]
        return [CONFIRMED] if has_times else self._why[:1]


def _speed(own: dict[str, str], per_host: int) -> Speed | None:
    """Of a device that has a name."""
    try:
        link = parse_link(own["link"]) if "link" in own else None
    except ValueError as error:
        raise ConfigError(f"--link: {error}") from None
    device = device_named(own.get("gpus"), own.get("hardware"))
    if device is None:
        if link is not None:
            raise ConfigError(
                "--link: a step's time needs a device by name too (--gpus 8xh100, --hardware "
                f"4090); there are {', '.join(DEVICES)}"
            )
        return None
    from shardwise.plan.speed import Speed, links_of

    return Speed(device, links_of(device, link, per_host))


def _rates(own: dict[str, str]) -> Rates | None:
    """Of a hardware file of CPU ranks, which `_devices` has read already."""
    if "hardware" not in own:
        return None
    from shardwise.plan.hardware import read_hardware
    from shardwise.plan.measured import read_rates

    try:
        path = Path(own["hardware"])
        return read_rates(path) if read_hardware(path)[0] == "cpu" else None
    except ValueError as error:
        raise ConfigError(f"--hardware: {error}") from None
