"""The rungs, from one rank without the engine to a resume on another number of ranks.

    1 plain    one rank, plain PyTorch: repeatable, a batch in parts, all that learns registered
    2 engine   the engine on one rank
    3 ranks    each number of ranks, strategy and transport; time, memory, what is communicated
    4 resume   saved, killed with SIGKILL, continued on another number of ranks

Each rung is compared with the plain run. A variant that fails ends its processes; the next one
starts with new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean

from shardwise.bench.memory import PssSampler
from shardwise.doctor.group import Group, RanksFailed
from shardwise.doctor.plan import Plan, Row, Variant
from shardwise.errors import ConfigError
from shardwise.units import counted

_EXACT = "to the last bit"
_CLOSE = "gradients and losses within 1e-3"
# What the engine says about models whose numbers cannot be had again on any number of ranks.
_REFUSALS = ("run.reproducible: ", "written by the forward")


def climb(plan: Plan, num_timed: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """All rows, as they are known."""
    ladder = _Ladder(plan, num_timed, tell)
    try:
        yield from ladder.plain()
        yield from ladder.engine()
        yield from ladder.ranks()
        yield ladder.resume()
    finally:
        ladder.end()


class _Ladder:
    def __init__(self, plan: Plan, num_timed: int, tell: Callable[[str], None]) -> None:
        self.plan, self._num_timed, self._tell = plan, num_timed, tell
        self._group: Group | None = None
        self._number = 0

    def plain(self) -> Iterator[Row]:
        self._tell("1 plain: one rank without the engine")
        try:
            rows = self._on(1).ask("baseline")[0]
        except RanksFailed as error:
            raise ConfigError(
                f"one rank in plain PyTorch cannot train it: {str(error).removeprefix('rank 0: ')}"
            ) from None
        yield from rows

    def engine(self) -> Iterator[Row]:
        """On one rank; here it shows whether numbers can be compared to the last bit."""
        row = self._compare(Variant(1), "2 engine")
        if row.result == "FAIL" and any(text in row.detail for text in _REFUSALS):
            reason = row.detail.partition("- ")[2] or row.detail
            yield Row("2 engine", "comparing bits", "SKIP", f"only with a tolerance: {reason}")
            self.plan = replace(self.plan, is_exact=False)
            self.end()
            row = self._compare(Variant(1), "2 engine")
        yield row

    def ranks(self) -> Iterator[Row]:
        for variant in self.plan.variants()[1:]:
            yield self._compare(variant, "3 ranks")

    def resume(self) -> Row:
        several = [n for n in self.plan.ranks if n > 1]
        if not several:
            return Row("4 resume", "", "SKIP", "needs more than one rank (--ranks 1,2)")
        before = Variant(several[0])
        after = Variant(next((n for n in reversed(self.plan.ranks) if n != several[0]), 1))
        ranks = f"{before.num_ranks} -> {counted(after.num_ranks, 'rank')}"
        row = Row("4 resume", f"{ranks}, saved, killed, resumed", detail=self._tolerance)
        self._tell(f"{row.rung}: {row.what}")
        half, last = self.plan.num_steps // 2, self.plan.num_steps
        try:
            group = self._on(before.num_ranks)
            difference = group.ask("compare", before, "resumed", half)[0].difference
            group.ask("save")
            self.end()  # SIGKILL
            found = self._on(after.num_ranks).ask("compare", after, "resumed", last)[0]
            if found.first_step != half:
                difference = difference or f"began after step {found.first_step}, not {half}"
            difference = difference or found.difference
        except RanksFailed as error:
            self._group, difference = None, str(error)
        if difference:
            row.result, row.detail = "FAIL", difference
        return row

    # -- one variant -----------------------------------------------------------------------------
    def _compare(self, variant: Variant, rung: str) -> Row:
        self._number += 1
        row = Row(rung, str(variant), detail=self._tolerance)
        self._tell(f"{rung}: {variant}")
        try:
            group = self._on(variant.num_ranks)
            directory = f"run_{self._number}"
            found = group.ask("compare", variant, directory, self.plan.num_steps)[0]
            if found.difference:
                row.result, row.detail = "FAIL", found.difference
                return row
            measured = group.ask("measure", self._num_timed)
            row.step_s = fmean(m.step_s for m in measured)
            row.waiting = fmean(m.waiting for m in measured)
            row.moved_bytes = round(fmean(m.moved_bytes for m in measured))
            with PssSampler(group.pids) as sampler:
                group.ask("step")
            row.peak_bytes = sampler.peak.total
        except RanksFailed as error:
            self._group = None
            row.result, row.detail = "FAIL", str(error)
        return row

    @property
    def _tolerance(self) -> str:
        return _EXACT if self.plan.is_exact else _CLOSE

    def _on(self, num_ranks: int) -> Group:
        """Ranks that are there already, or new ones."""
        if self._group is None or self._group.num_ranks != num_ranks:
            self.end()
            self._group = Group(self.plan, num_ranks)
        return self._group

    def end(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = None
