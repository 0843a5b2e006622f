"""Every leaf of a file of others, what becomes of it, and the keys of ours that follow.

    leaf -> Row (translated, same by default, not needed, auto, unsupported, unknown)
         -> Setting of ours, if translated; it says where it came from

`Account` is the whole; a `Part` is a table in it, or a second file, seen by its own names. What
nobody has spoken for at the end is unknown: nothing is dropped.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Path = tuple[str, ...]
_COMMENTS = ("_comment", "//", "#")  # JSON has none, so people write keys
_LARGEST = 2**53  # above it a number of JSON is no whole number to everybody


class Outcome(StrEnum):
    TRANSLATED = "translated"
    SAME = "same by default"
    NOT_NEEDED = "not needed"
    AUTO = "auto"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Row:
    """One leaf; `ours` are keys of ours that it sets, or options of a command."""

    key: str
    value: Any
    outcome: Outcome
    note: str = ""
    ours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key of ours, and where it came from."""

    value: Any
    origin: str


@dataclass
class Account:
    """What is known of one import."""

    ranks: int | None = None
    leaves: dict[Path, Any] = field(default_factory=dict)
    rows: dict[Path, Row] = field(default_factory=dict)
    settings: dict[str, Setting] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, document: Mapping[str, Any], prefix: Path = ()) -> Part:
        """Takes in a table, or one more file (its prefix is its name with a colon)."""
        self.leaves |= dict(leaves_of(document, prefix))
        return Part(self, prefix)

    def ordered_rows(self) -> list[Row]:
        return [self.rows[path] for path in self.leaves]


def leaves_of(table: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no table with keys of its own."""
    for key, value in table.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, path)
        else:
            yield path, value


def shown(value: Any) -> str:
    """On one line, without characters that a terminal obeys."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if text.isprintable() else json.dumps(value, default=str).replace("\x7f", "\\u007f")


def one_line(text: str) -> str:
    """A sentence that may quote a file, without line ends and what a terminal obeys."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def name_of(path: Path) -> str:
    """`zero_optimization.stage`; of a second file `ds.json: zero_optimization.stage`."""
    parts = [p if p and p.isprintable() and "." not in p.rstrip(":") else shown(p) for p in path]
    if path[0].endswith(":"):  # a file
        return f"{path[0] if path[0].isprintable() else shown(path[0])} {'.'.join(parts[1:])}"
    return ".".join(parts)


@dataclass
class Part:
    """A table of an account, by dotted names of its own. Words about a key that is not there do
    nothing, so whoever translates need not ask first."""

    account: Account
    prefix: Path = ()
    auto: Mapping[str, str] = field(
        default_factory=dict
    )  # key ("": any) -> where its "auto" is taken from

    def path(self, key: str) -> Path:
        return (*self.prefix, *key.split("."))

    def name(self, key: str) -> str:
        return name_of(self.path(key))

    def at(self, section: str) -> Part:
        return Part(self.account, self.path(section))

    def names(self, section: str = "") -> list[str]:
        """Dotted names of all leaves below."""
        head = self.path(section) if section else self.prefix
        skip = len(self.prefix)
        return [".".join(p[skip:]) for p in self.account.leaves if p[: len(head)] == head]

    def get(self, key: str) -> Any:
        return self.account.leaves.get(self.path(key))

    def is_set(self, key: str) -> bool:
        """Whether the file says anything of it; null says nothing, "auto" does."""
        return self.get(key) is not None

    # -- values of a type; one of another type is accounted for, and as if it were not there ------
    def flag(self, key: str) -> bool | None:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        value = self._value(key)
        return value if isinstance(value, bool) else self._read(key, words, "true or false")

    def number(self, key: str) -> float | None:
        value = self._value(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML takes 1e-5 for text
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and abs(value) <= _LARGEST):
            return value
        return self._wrong(key, "a number")

    def whole(self, key: str) -> int | None:
        value = self.number(key)
        if value is None or value == int(value):
            return None if value is None else int(value)
        return self._wrong(key, "a whole number")

    def text(self, key: str) -> str | None:
        value = self._value(key)
        return value if value is None or isinstance(value, str) else self._wrong(key, "a text")

    def choice(self, key: str, known: Mapping[str, Any]) -> Any:
        """What a word stands for, in whatever case."""
        return self._read(key, known, f"one of {', '.join(known)}")

    def numbers(self, key: str) -> list[float] | None:
        value = self._value(key)
        good = isinstance(value, list) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= _LARGEST
            for v in value
        )
        return value if value is None or good else self._wrong(key, "a list of numbers")

    def _value(self, key: str) -> Any:
        value = self.get(key)
        if isinstance(value, str) and value.lower() == "auto" and self.auto:
            self._row(key, Outcome.AUTO, f"taken from {self.auto.get(key, self.auto[''])}")
            return None
        return value

    def _read(self, key: str, words: Mapping[str, Any], expected: str) -> Any:
        value = self._value(key)
        if value is None:
            return None
        folded = {word.lower(): meaning for word, meaning in words.items()}
        word = str(value).lower()
        return folded[word] if word in folded else self._wrong(key, expected)

    def _wrong(self, key: str, expected: str) -> None:
        self.refuse(key, f"expected {expected}, found {shown(self.get(key))}")

    # -- words about a leaf -----------------------------------------------------------------------
    def becomes(self, key: str, ours: str, value: Any, note: str = "") -> None:
        """This leaf, alone or with others, sets that key of ours."""
        if self.path(key) not in self.account.leaves:
            return
        before = self.account.settings.setdefault(ours, Setting(value, self.name(key)))
        if before.value != value:
            self.warn(
                f"{before.origin} and {self.name(key)} disagree on {ours}: "
                f"{shown(before.value)} is taken, not {shown(value)}"
            )
            note = f"{before.origin} = {shown(before.value)} is taken"
        row = self.account.rows.get(self.path(key))
        also, said = (row.ours, row.note) if row is not None else ((), "")
        note = "; ".join(dict.fromkeys(filter(None, (said, note))))
        self._row(key, Outcome.TRANSLATED, note, (*also, ours))

    def turns_on(
        self, key: str, ours: str, value: Any = True, note: str = "", off: str = "off here too"
    ) -> bool:
        """A switch that sets that key of ours where it is on; whether it is."""
        on = self.flag(key)
        if on:
            self.becomes(key, ours, value, note)
        elif on is not None:
            self.same(key, off)
        return bool(on)

    def sets_number(self, key: str, ours: str, note: str = "") -> None:
        if (value := self.number(key)) is not None:
            self.becomes(key, ours, float(value), note)

    def sets_whole(self, key: str, ours: str, note: str = "") -> None:
        if (value := self.whole(key)) is not None:
            self.becomes(key, ours, value, note)

    def option(self, key: str, option: str, note: str = "") -> None:
        """It is an option of the command line here."""
        self._row(key, Outcome.TRANSLATED, note, (option,))

    def assume(self, ours: str, value: Any, why: str) -> None:
        """What the other program does when its file says nothing, where ours would do otherwise."""
        self.account.settings.setdefault(ours, Setting(value, one_line(why)))

    def same(self, key: str, note: str) -> None:
        self._row(key, Outcome.SAME, note)

    def same_if(self, key: str, is_same: bool, otherwise: str = "") -> None:
        if is_same:
            self.same(key, "as here")
        elif otherwise:
            self.refuse(key, otherwise)

    def skip(self, key: str, note: str) -> None:
        self._row(key, Outcome.NOT_NEEDED, note)

    def skip_rest(self, key: str, note: str) -> None:
        """Where nobody has spoken for it yet."""
        if self.path(key) not in self.account.rows:
            self.skip(key, note)

    def refuse(self, key: str, note: str) -> None:
        self._row(key, Outcome.UNSUPPORTED, note)

    def switch(self, key: str, refusal: str, off: str = "off here too") -> None:
        """Unsupported where it is on, nothing to do where it is off."""
        on = self.flag(key)
        if on:
            self.refuse(key, refusal)
        elif on is not None:
            self.same(key, off)

    def warn(self, text: str) -> None:
        text = one_line(text)
        if text not in self.account.warnings:
            self.account.warnings.append(text)

    def _row(self, key: str, outcome: Outcome, note: str, ours: tuple[str, ...] = ()) -> None:
        path = self.path(key)
        if path in self.account.leaves:
            value = self.account.leaves[path]
            note = one_line(note)
            self.account.rows[path] = Row(name_of(path), value, outcome, note, ours)

    def finish(self, skipped: Mapping[str, str], known: Iterable[str] = ()) -> None:
        """Speaks for what is left. `skipped`: reason -> keys that need no word of ours, a star at
        the end for all below. `known`: further keys of the format; sections end in a dot."""
        plain: dict[str, str] = {}
        stars: dict[str, str] = {}
        for reason, keys in skipped.items():
            for key in keys.split():
                (stars if key.endswith("*") else plain)[key.rstrip("*")] = reason
        names = {name for name in {*plain, *known} if not name.endswith(".")}
        sections = {name.rpartition(".")[0] for name in {*names, *known, *stars}} - {""}
        for path, value in list(self.account.leaves.items()):
            is_below = len(path) > len(self.prefix) and path[: len(self.prefix)] == self.prefix
            if path in self.account.rows or not is_below:
                continue
            key = ".".join(path[len(self.prefix) :])
            reason = plain.get(key) or next((r for s, r in stars.items() if key.startswith(s)), "")
            if path[-1].startswith(_COMMENTS):
                note = "a comment, by its name"
                self.account.rows[path] = Row(name_of(path), value, Outcome.NOT_NEEDED, note)
            elif self.path(key) != path:  # a dot in a name
                hint = _nearest(key, [*names, *sections])
                self.account.rows[path] = Row(name_of(path), value, Outcome.UNKNOWN, hint)
            elif reason:
                self.skip(key, reason)
            elif value is None and (key in names or key in sections):
                self.skip(key, "is null, as if it were left out")
            elif value == {} and key in sections:
                self.skip(key, "an empty section")
            elif key in sections:
                self._wrong(key, "a table of keys")
            else:
                self._row(key, Outcome.UNKNOWN, _nearest(key, [*names, *sections]))


def _nearest(key: str, known: Iterable[str]) -> str:
    """The known key with the nearest name: as a whole, elsewhere, in another section."""
    known = sorted(known)
    last = key.rpartition(".")[2]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    tops = sorted({name.partition(".")[0] for name in known})
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    close = close or (elsewhere if len(elsewhere) == 1 else [])
    close = close or difflib.get_close_matches(key.partition(".")[0], tops, n=1, cutoff=0.8)
    return f"did you mean {close[0]}?" if close else "no key of this format has a name like it"
