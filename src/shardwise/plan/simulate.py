"""The time of a step, by the schedule that the engine executes.

    compute   F0 F1 F2 L B2 B1 B0 | step         a unit runs when its gather is complete
    gather    G0 G1 G2    G1 G0                  a unit's and the next one's, when it begins
    reduce                   R2 R1 R0            behind the unit's backward

Where computation and communication do not overlap (CPU ranks without `set_prefetch`) the lanes are
one. Nothing is known here of what a device does but these times: kernels' launches, the allocator,
other jobs on the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Seconds of one unit in one micro-batch. `gather_again`: before its backward; 0 where it
    stays. `gathers_once`: what is gathered stays until the parameters are written. `is_root`:
    gathered first, backward last.
    """

    name: str
    forward: float
    backward: float
    gather: float = 0.0
    gather_again: float = 0.0
    reduce: float = 0.0
    is_root: bool = False
    gathers_once: bool = False


@dataclass(slots=True)
class StepTime:
    """`timeline`: (lane, unit, what, begin, end), in seconds."""

    step_s: float = 0.0
    compute_s: float = 0.0
    timeline: list[tuple[str, str, str, float, float]] = field(default_factory=list)

    @property
    def exposed_s(self) -> float:
        """In which the device waits for communication."""
        return max(0.0, self.step_s - self.compute_s)


def simulate(
    units: Sequence[UnitTime],
    *,
    step_s: float = 0.0,
    micro_batches: int = 1,
    reduces_each: bool = True,
    overlaps: bool = True,
) -> StepTime:
    """One optimizer step.

    Args:
        units: in the order of the forward, the root anywhere.
        step_s: of the optimizer.
        reduces_each: every micro-batch is reduced; else the last one is.
        overlaps: communication runs beside computation.
    """
    run = _Run(overlaps)
    order = sorted(units, key=lambda unit: not unit.is_root)
    for number in range(micro_batches):
        reduces = reduces_each or number == micro_batches - 1
        run.forward(order, is_first=number == 0)
        run.backward(order, reduces=reduces)
    run.compute("", "step", step_s, after=run.end_of("reduce"))
    return run.made


class _Run:
    """Lanes that are free from some time on."""

    def __init__(self, overlaps: bool) -> None:
        self.made = StepTime()
        self._free: dict[str, float] = {}
        self._overlaps = overlaps

    def end_of(self, lane: str) -> float:
        return self._free.get(lane if self._overlaps else "all", 0.0)

    def _put(self, lane: str, unit: str, what: str, seconds: float, after: float) -> float:
        place = lane if self._overlaps else "all"
        begin = max(self._free.get(place, 0.0), after)
        end = begin + seconds
        if seconds:
            self.made.timeline.append((lane, unit, what, begin, end))
        self._free[place] = end
        self.made.step_s = max(self.made.step_s, end)
        return end

    def compute(self, unit: str, what: str, seconds: float, after: float) -> float:
        self.made.compute_s += seconds
        return self._put("compute", unit, what, seconds, after)

    def forward(self, order: Sequence[UnitTime], *, is_first: bool) -> None:
        gathers = [
            ("gather", unit.gather if is_first or not unit.gathers_once else 0.0) for unit in order
        ]
        self._pass(order, gathers, [("forward", unit.forward) for unit in order], reduces=False)

    def backward(self, order: Sequence[UnitTime], *, reduces: bool) -> None:
        behind = list(reversed(order))
        gathers = [("gather again", unit.gather_again) for unit in behind]
        self._pass(behind, gathers, [("backward", unit.backward) for unit in behind], reduces)

    def _pass(
        self,
        order: Sequence[UnitTime],
        gathers: Sequence[tuple[str, float]],
        runs: Sequence[tuple[str, float]],
        reduces: bool,
    ) -> None:
        ready: list[float] = []
        for i, unit in enumerate(order):
            now = self.end_of("compute")
            # A unit's own gather, if nobody has issued it, and the next one's.
            due = range(len(ready), min(i + 1 + self._overlaps, len(order)))
            ready += [self._put("gather", order[j].name, *gathers[j], now) for j in due]
            end = self.compute(unit.name, *runs[i], ready[i])
            if reduces:
                self._put("reduce", unit.name, "reduce", unit.reduce, end)
