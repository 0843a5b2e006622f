"""Tables for a console of any width: no cell is cut."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 160
_BOXED, _OPEN = 3, 2  # characters between two columns


@dataclass(frozen=True, slots=True)
class Column:
    """One column of texts; numbers stand at the right."""

    name: str
    cells: list[str]
    is_number: bool = True

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))


def console_of(stream: Any) -> Console:
    """As wide as COLUMNS or the terminal say; wide enough for most tables in a file."""
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(file=stream, width=None if known else _FILE_WIDTH, highlight=False)


def print_columns(console: Console, title: str, columns: Sequence[Column]) -> None:
    """One table, where it fits; else without lines; else several, each with the first column."""
    if _width(columns, _BOXED) <= console.width:
        console.print(_table(columns, title, Table(pad_edge=False)))
        return
    for number, part in enumerate(_parts(columns, console.width)):
        table = Table(box=None, pad_edge=False, header_style="underline")
        console.print(_table(part, "" if number else title, table))
        console.print()


def _parts(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    first, *rest = columns
    part = [first]
    for column in rest:
        if len(part) > 1 and _width([*part, column], _OPEN) > width:
            yield part
            part = [first]
        part.append(column)
    yield part


def _width(columns: Sequence[Column], between: int) -> int:
    return sum(column.width + between for column in columns)


def _table(columns: Sequence[Column], title: str, table: Table) -> Table:
    table.title, table.title_justify = title or None, "left"
    for number, column in enumerate(columns):
        # Only a first column that leaves no room for another may take several lines.
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=number > 0,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table
