"""All checks of a run, and what is shown beside them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.doctor.finding import Finding, sorted_findings
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.ending import check_end
from shardwise.doctor.run.learning import check_evaluation, check_loss
from shardwise.doctor.run.memory import by_kind, check_memory
from shardwise.doctor.run.samples import check_samples
from shardwise.doctor.run.settings import check_settings
from shardwise.doctor.run.time import check_time
from shardwise.doctor.run.warned import check_warnings
from shardwise.units import counted, text_of_bytes

CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    check_end, check_samples, check_loss, check_memory, check_time, check_settings,
    check_evaluation, check_warnings,
)  # fmt: skip


def examine(case: Case) -> list[Finding]:
    return sorted_findings([finding for check in CHECKS for finding in check(case)])


def facts(case: Case) -> dict[str, Any]:
    """What the run was, ready for JSON."""
    state = "runs" if case.is_live else "ended" if case.end else "not known"
    return {
        "run": str(case.path),
        "state": state,
        "step": case.last_step,
        "steps": case.config.train.steps,
        "ranks": case.num_ranks or None,
        "device": case.start.get("device"),
        "memory": by_kind(case) | {"measured": case.growth_bytes},
        "notes": list(notes(case)),
    }


def notes(case: Case) -> Iterator[str]:
    """What could not be looked at, and why."""
    if not case.rows:
        yield "no step is recorded yet (metrics.jsonl)"
    if not case.start:
        yield (
            "the run has no log.jsonl (an older version wrote it): its end, its time and its "
            "memory by kind are not looked at"
        )
    elif case.predicted is None:
        yield "memory by kind is not known: the model is your own, or is not where it was"


def print_facts(case: Case) -> None:
    from shardwise.train.columns import Column, console_of, print_columns

    console, found = console_of(sys.stdout), facts(case)
    ranks = f", {counted(case.num_ranks, 'rank')} on {found['device']}" if case.num_ranks else ""
    state = {"runs": "running, ", "ended": ""}.get(found["state"], "")
    console.print(
        f"{case.path}: {state}step {found['step']} of {found['steps']}{ranks}", markup=False
    )
    memory = found["memory"]
    if len(memory) > 1 and case.growth_bytes:
        columns = [Column(name, [text_of_bytes(size)]) for name, size in memory.items()]
        print_columns(console, "memory of a rank: by the plan, and measured at most", columns)
    for note in found["notes"]:
        console.print(f"- {note}", markup=False)
