"""A run as one HTML page: readable without a network, and by whoever has never seen the run.

Order: what the run is and how it ended, what `doctor` finds, the pictures, what was promised beside
what happened, events, traces, the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean, median
from typing import Any

from shardwise.doctor.finding import Finding
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.checks import examine, facts
from shardwise.report import charts
from shardwise.train.config import resolved_strategy
from shardwise.units import counted, text_of_bytes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .9rem .15rem 0;
       border-bottom: 1px solid #e4e4e4; vertical-align: top; } td.n, th.n { text-align: right; }
svg { max-width: 100%; height: auto; } pre { background: #f6f6f6; padding: .6rem .8rem;
       overflow-x: auto; font-size: 13px; } .finding { border-left: 4px solid #b0b7bd;
       padding-left: .8rem; margin: 1rem 0; } .wrong { border-color: #c0392b; }
.costs { border-color: #e08e0b; } .small { color: #666; font-size: 13px; }
"""
Cell = str | tuple[str]  # a tuple: a number, which stands at the right
_UNKNOWN = "not known"


def page(case: Case) -> str:
    """The whole file."""
    about = facts(case)
    found = examine(case)
    title = f"{case.path.name}: step {about['step']:,} of {about['steps']:,}"
    pictures = (
        ("Loss", charts.loss(case)),
        ("Speed", charts.speed(case)),
        ("Memory of a rank", charts.memory(case, about["memory"])),
        ("Where a step's time goes", charts.time(case)),
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        table([], [[name, text] for name, text in summary(case, about)]),
        *("<p class='small'>" + escape(note) + "</p>" for note in about["notes"]),
        section("Findings", findings(found)),
        *(section(name, picture) for name, picture in pictures if picture),
        section("Promised and found", promises(case, about["memory"])),
        section("Events", events(case)),
        section("Traces", traces(case)),
        section("Configuration", configuration(case)),
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{_STYLE}</style>"
    view = "<meta name='viewport' content='width=device-width'>"
    body = "\n".join(filter(None, parts))
    html = f"<html lang='en'><head>{head}{view}</head><body>\n{body}\n</body></html>"
    return f"<!doctype html>\n{html}\n"


def section(name: str, content: str) -> str:
    return f"<h2>{escape(name)}</h2>\n{content}" if content else ""


def table(head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """Everything is escaped."""

    def cells(kind: str, row: Sequence[Cell]) -> str:
        made = (
            f"<{kind} class='n'>{escape(cell[0])}</{kind}>"
            if isinstance(cell, tuple)
            else f"<{kind}>{escape(cell)}</{kind}>"
            for cell in row
        )
        return "<tr>" + "".join(made) + "</tr>"

    lines = [cells("th", head)] if head else []
    return "<table>" + "\n".join([*lines, *(cells("td", row) for row in rows)]) + "</table>"


def summary(case: Case, about: dict[str, Any]) -> list[tuple[str, str]]:
    start, rows = case.start, case.steady or case.rows
    states = {"runs": "is running", "ended": "is over", "not known": "has not said how it ended"}
    found = [("the run", states[about["state"]]), ("directory", str(case.path))]
    if start:
        ranks = counted(case.num_ranks, "rank")
        found.append(("on", f"{ranks}, {start.get('device')}, torch {start.get('torch')}"))
        found.append(("newest start", f"{start.get('at')}, from step {start.get('step')}"))
    found.append(("strategy", resolved_strategy(case.config)))
    if rows and "loss" in rows[-1]:
        found.append(("last loss", f"{rows[-1]['loss']:.4f}"))
    held = [row["val_loss"] for row in case.all_rows if "val_loss" in row]
    if held:
        found.append(("val_loss", f"{held[-1]:.4f} at the end, {min(held):.4f} at best"))
    times = [row["step_time_s"] for row in rows if row.get("step_time_s")]
    tokens = [row["tokens_per_s"] for row in rows if row.get("tokens_per_s")]
    if times and tokens:
        text = (
            f"{median(times):.3g} s, {median(tokens):,.0f} tokens/s (medians of {len(times)} steps)"
        )
        found.append(("a step", text))
    return found


def findings(found: Sequence[Finding]) -> str:
    if not found:
        return "<p>None.</p>"
    shown = []
    for finding in found:
        weight = finding.as_json()["weight"]
        shown.append(
            f"<div class='finding {weight}'><b>{escape(finding.title)}</b> ({weight})<br>"
            f"{escape(finding.evidence)}<br>{escape(finding.meaning)}"
            f"<pre>{escape(finding.remedy)}</pre></div>"
        )
    return "\n".join(shown)


def promises(case: Case, memory: dict[str, int]) -> str:
    """What the plan says of a rank beside what the run took."""
    rows: list[list[Cell]] = []
    predicted = case.predicted
    if predicted is not None:
        plan = predicted.plan
        for name, size in memory.items():
            if name not in ("predicted", "measured"):
                rows.append([name, (text_of_bytes(size),), ("",), "by kind nothing is measured"])
        total = memory["predicted"]
        share = f"{case.growth_bytes / total:.2f} of the promise" if total else ""
        measured = (text_of_bytes(case.growth_bytes),)
        rows.append(["memory of a rank, at most", (text_of_bytes(total),), measured, share])
        units = case.start.get("units", [])
        both = (str(len(plan.units)),), (str(len(units)),)
        rows.append(["units", *both, "" if both[0] == both[1] else "differ"])
        largest = max((unit.layout.full_bytes for unit in plan.units), default=0)
        seen = max((int(unit["gathered_bytes"]) for unit in units), default=0)
        same = "" if largest == seen else "differ"
        rows.append(["largest unit", (text_of_bytes(largest),), (text_of_bytes(seen),), same])
        received = text_of_bytes(plan.received_bytes)
        rows.append(["received by a rank in a micro-batch", (received,), ("",), ""])
        if plan.refreshed_bytes:
            text = text_of_bytes(plan.refreshed_bytes)
            rows.append(["... and once a step", (text,), ("",), ""])
    if case.by_rank:
        waits = sum(fmean(row["waiting_s"]) for row in case.by_rank)
        share = waits / sum(row["step_time_s"] for row in case.by_rank)
        rows.append(
            ["share of a step that ranks wait for each other", ("",), (f"{share:.0%}",), ""]
        )
    if case.link:
        share = case.link["link_s"] / case.link["step_s"]
        rows.append(["share of the link between hosts", ("",), (f"{share:.0%}",), ""])
    head: list[Cell] = ["", ("by the plan",), ("in the run",), ""]
    return table(head, rows) if rows else ""


def events(case: Case) -> str:
    rows: list[list[Cell]] = []
    for row in case.log[-40:]:
        rest = {k: v for k, v in row.items() if k in ("seconds", "ranks", "why", "reason", "code")}
        text = ", ".join(f"{key} {value}" for key, value in rest.items())
        rows.append([str(row.get("at", "")), (f"{row['step']:,}",), str(row.get("event")), text])
    more = len(case.log) - 40
    note = f"<p class='small'>{more} earlier ones are in log.jsonl</p>" if more > 0 else ""
    return note + table(["at", ("step",), "what", ""], rows) if rows else ""


def traces(case: Case) -> str:
    files = sorted((case.path / "profile").glob("step_*_rank_*.json*"))
    if not files:
        return ""
    rows = [[file.name, (text_of_bytes(file.stat().st_size),)] for file in files]
    where = escape(str(case.path / "profile"))
    note = f"<p>In {where}; open them at ui.perfetto.dev (they stay on your machine) or chrome://tracing.</p>"
    return note + table([], rows)


def configuration(case: Case) -> str:
    text = (case.path / "config.toml").read_text(encoding="utf-8")
    return f"<details><summary>config.toml</summary><pre>{escape(text)}</pre></details>"
