"""What an import shows: the table of all keys, the TOML of ours, both as JSON.

Settings are tried as `shardwise train` would read them; one that it refuses does not get into the
TOML, and the keys that it came from are unsupported, with the reason. So what is written loads.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.errors import ConfigError
from shardwise.importing.account import Account, Outcome, Row, Setting, one_line, shown
from shardwise.train.config import SECTIONS
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig, load_config, toml_value
from shardwise.units import counted

_STYLES = {
    Outcome.TRANSLATED: "green", Outcome.SAME: "green", Outcome.NOT_NEEDED: "dim",
    Outcome.AUTO: "cyan", Outcome.UNSUPPORTED: "yellow", Outcome.UNKNOWN: "red",
}  # fmt: skip
_WIDE = 110
_LEFT = (Outcome.AUTO, Outcome.UNSUPPORTED, Outcome.UNKNOWN)
# Sections in an order in which each may be judged by those before it.
_ORDER = ["mesh", *(name for name in SECTIONS if name != "mesh")]


@dataclass(frozen=True, slots=True)
class Imported:
    """An import that is over: rows in the file's order, settings that load."""

    kind: str
    file: str
    ranks: int | None
    rows: list[Row]
    settings: dict[str, Setting]
    warnings: list[str]

    def counts(self) -> dict[str, int]:
        found = Counter(row.outcome for row in self.rows)
        return {outcome.value: found[outcome] for outcome in Outcome if found[outcome]}


def settle(account: Account, kind: str, file: str) -> Imported:
    """Leaves out what `shardwise train` would refuse, and says so in its rows."""
    settings, refused = _tried(account.settings)
    rows = account.ordered_rows()
    for row in rows:
        reasons: list[str] = [refused[key] for key in row.ours if key in refused]
        row.ours = tuple(key for key in row.ours if key not in refused)
        if reasons and not row.ours:
            row.outcome, row.note = Outcome.UNSUPPORTED, "; ".join(reasons)
        elif reasons:
            row.note = "; ".join([row.note, *reasons] if row.note else reasons)
    warnings = list(account.warnings)
    if account.ranks:
        loaded = _load(settings).on(account.ranks)
        for key, text in world_problems(loaded.config, account.ranks):
            warnings.append(f"on {counted(account.ranks, 'rank')}: {key}: {text}")
    return Imported(kind, file, account.ranks, rows, settings, warnings)


def _tried(settings: dict[str, Setting]) -> tuple[dict[str, Setting], dict[str, str]]:
    ordered = {key: settings[key] for key in sorted(settings, key=_place)}
    try:
        _load(ordered)
        return ordered, {}
    except ConfigError:  # at least one is wrong: find out which, one after the other
        pass
    good: dict[str, Setting] = {}
    refused: dict[str, str] = {}
    for key, setting in ordered.items():
        try:
            _load({**good, key: setting})
            good[key] = setting
        except ConfigError as error:
            refused[key] = one_line(str(error).removeprefix("--"))
    for section in {key.partition(".")[0] for key in refused}:  # some stand together only
        rest = {key: ordered[key] for key in refused if key.startswith(f"{section}.")}
        with contextlib.suppress(ConfigError):
            _load({**good, **rest})
            good |= rest
            for key in rest:
                del refused[key]
    return {key: good[key] for key in ordered if key in good}, refused


def _load(settings: dict[str, Setting]) -> LoadedConfig:
    def text(key: str, value: Any) -> str:
        plain = isinstance(value, str) and key != "shard.unit"
        return value if plain else toml_value(value)

    return load_config(None, [(key, text(key, s.value)) for key, s in settings.items()])


def _place(key: str) -> tuple[int, int]:
    section, _, name = key.partition(".")
    names = [f.name for f in fields(SECTIONS[section])]
    return _ORDER.index(section), names.index(name) if name in names else len(names)


def as_toml(found: Imported) -> str:
    """Ours, with a comment a line that says where it came from."""
    ranks = f", {counted(found.ranks, 'rank')}" if found.ranks else ""
    lines = [
        f"# From {one_line(found.file)} ({found.kind}{ranks}) by shardwise import-config.",
        "# Your model and data go into [model] and [data].",
    ]
    for section in SECTIONS:
        own = {k: s for k, s in found.settings.items() if k.startswith(f"{section}.")}
        if own:
            lines += ["", f"[{section}]"]
            texts = {k: f"{k.partition('.')[2]} = {toml_value(s.value)}" for k, s in own.items()}
            width = max(map(len, texts.values()))
            lines += [f"{texts[k]:{width}}  # {s.origin}" for k, s in own.items()]
    left = [row for row in found.rows if row.outcome in _LEFT]
    if left:
        lines += ["", "# Not taken over:"]
        lines += [f"# {row.key} = {shown(row.value)}: {row.outcome}: {row.note}" for row in left]
    return "\n".join(lines) + "\n"


def as_json(found: Imported) -> dict[str, Any]:
    return {
        "file": found.file,
        "kind": found.kind,
        "ranks": found.ranks,
        "counts": found.counts(),
        "rows": [
            {
                "key": row.key,
                "value": _strict(row.value),
                "outcome": row.outcome.value,
                "becomes": _becomes(row, found),
                "note": row.note,
            }
            for row in found.rows
        ],
        "settings": {key: setting.value for key, setting in found.settings.items()},
        "warnings": found.warnings,
        "toml": as_toml(found),
    }


def _strict(value: Any) -> Any:
    """As strict JSON has it, which knows no dates, NaN or Infinity."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError):
        return shown(value)


def _becomes(row: Row, found: Imported) -> list[str]:
    return [
        f"{key} = {toml_value(found.settings[key].value)}" if key in found.settings else key
        for key in row.ours
    ]


def _table(found: Imported) -> Table:
    table = Table(title=Text(f"{found.file}: {found.kind}"), title_justify="left", pad_edge=False)
    for name, share in (("key", 3), ("value", 2), ("becomes", 3), ("why", 5)):
        table.add_column(name, ratio=share, overflow="fold")
    for row in found.rows:
        becomes = Text("\n".join(_becomes(row, found)) or row.outcome, _STYLES[row.outcome])
        table.add_row(Text(row.key), Text(shown(row.value)), becomes, Text(row.note))
    return table


def show(console: Console, found: Imported) -> None:
    """The table (on a narrow console a paragraph for each key), the warnings, the TOML."""
    if console.width >= _WIDE:
        console.print(_table(found))
    else:
        console.print(f"{found.file}: {found.kind}", markup=False)
        for row in found.rows:
            becomes = ", ".join(_becomes(row, found)) or row.outcome.value
            text = Text(f"{row.key} = {shown(row.value)}\n    ")
            text.append(becomes, _STYLES[row.outcome]).append(f": {row.note}" if row.note else "")
            console.print(text)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in found.counts().items())
    console.print(f"{len(found.rows)} keys: {counts}", markup=False)
    for text in found.warnings:
        console.print(f"! {text}", markup=False, style="yellow")
    console.print()
    console.out(as_toml(found), end="", highlight=False)
