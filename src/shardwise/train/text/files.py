"""Records of local files, one by one, each with its place, for errors that name it.

    .jsonl .ndjson .json     objects one a line, or (.json) a list of them
    .csv .tsv                a header, then rows; every value is the text that stands there
    .parquet                 rows
    anything else            format "text" only: the whole file is one text

`datasets` reads them, one file at a time and as a stream: it leaves nothing in its own cache. Lines
of JSON go through its reader of text and then through Python's `json`, since its own reader of JSON
guesses types (a text that looks like a date becomes one) and does not say which line is broken.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.sources import files_named

_LINES, _TABLES = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv", ".parquet")
_TEXTS = (".txt", ".text", ".md", ".rst")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands: `chats.jsonl:7`, or `chats.parquet, row 7`."""

    file: Path
    number: int = 0
    word: str = "line"

    def __str__(self) -> str:
        if not self.number:
            return str(self.file)
        return (
            f"{self.file}:{self.number}"
            if self.word == "line"
            else (f"{self.file}, {self.word} {self.number}")
        )


class RecordError(ConfigError):
    """A record that cannot be used; `data.invalid = "skip"` passes it by."""

    def __init__(self, place: Place, text: str) -> None:
        super().__init__(f"data.source: {place}: {text}")


@dataclass(frozen=True, slots=True)
class Record:
    place: Place
    values: dict[str, Any]


def find_files(source: str | tuple[str, ...], format: str) -> list[Path]:
    """The files that `data.source` names, those of a directory in the order of their names."""
    known = (*_LINES, *_TABLES, *(_TEXTS if format == "text" else ()))

    def inside(folder: Path) -> list[Path]:
        there = sorted(p for p in folder.rglob("*") if p.is_file() and _kind(p) in known)
        return [p for p in there if not _is_hidden(p.relative_to(folder))]

    files = files_named(source, inside, f"{{path}} has no file of {' '.join(known)}")
    for path in files:
        if format != "text" and _kind(path) not in (*_LINES, *_TABLES):
            raise ConfigError(
                f"data.source: {path}: a {format} needs fields; use {', '.join(_LINES + _TABLES)}, "
                "or data.format = 'text'"
            )
        if not path.stat().st_size:
            raise ConfigError(f"data.source: {path}: is empty")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def read_records(path: Path, text_field: str, work: Path) -> Iterator[Record | RecordError]:
    """All records of a file; an error in place of one that is no record. A file that is one text
    has it in `text_field`; `work` is a folder for locks of `datasets`."""
    kind = _kind(path)
    try:
        if kind in _LINES:
            yield from _read_json(path, kind, work)
        elif kind in (".csv", ".tsv"):
            yield from _read_csv(path, "\t" if kind == ".tsv" else ",", work)
        elif kind == ".parquet":
            yield from _numbered(path, "row", _stream("parquet", path, work))
        else:
            for row in _stream("text", path, work, sample_by="document"):
                yield Record(Place(path), {text_field: row["text"]})
    except ConfigError:
        raise
    except UnicodeDecodeError:
        place = Place(path, _first_line_that_is_no_text(path))
        raise ConfigError(f"data.source: {place}: is not text in UTF-8") from None
    except (OSError, ValueError, EOFError) as error:  # pandas and pyarrow raise kinds of ValueError
        why = " ".join(str(error).split())
        raise ConfigError(f"data.source: {path}: cannot be read: {why}") from None


def _stream(kind: str, path: Path, work: Path, **options: Any) -> Any:
    """The rows of a file by one of the readers that `datasets` has built in; nothing is fetched,
    and no script is run."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is raised too
    return datasets.load_dataset(
        kind,
        data_files=[str(path.resolve())],
        split="train",
        streaming=True,
        cache_dir=str(work),
        **options,
    )


def _numbered(path: Path, word: str, rows: Any) -> Iterator[Record]:
    for number, row in enumerate(rows, start=1):
        yield Record(Place(path, number, word), row)


def _read_json(path: Path, kind: str, work: Path) -> Iterator[Record | RecordError]:
    if kind == ".json":
        (row,) = _stream("text", path, work, sample_by="document")
        if (whole := _parsed(row["text"])) is not None:
            yield from _listed(path, whole)
            return
    for number, row in enumerate(_stream("text", path, work), start=1):
        line = row["text"].removeprefix("\ufeff")
        if line.strip():
            yield _from_line(Place(path, number), line)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):  # objects one a line, or a mistake that the lines show
        return None


def _listed(path: Path, whole: Any) -> Iterator[Record | RecordError]:
    if isinstance(whole, dict):
        whole = [whole]
    if not isinstance(whole, list):
        raise ConfigError(
            f"data.source: {path}: holds {_named(whole)}; expected a list of objects, or objects "
            "one a line"
        )
    for number, value in enumerate(whole, start=1):
        place = Place(path, number, "record")
        is_record = isinstance(value, dict)
        yield Record(place, value) if is_record else RecordError(place, _no_object(value))


def _from_line(place: Place, line: str) -> Record | RecordError:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return RecordError(place, f"is not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return RecordError(place, "is nested too deep")
    except ValueError:  # Python's limit of digits
        return RecordError(place, "holds a number of too many digits")
    return (
        Record(place, value) if isinstance(value, dict) else RecordError(place, _no_object(value))
    )


def _no_object(value: Any) -> str:
    return f"expected an object with fields, found {_named(value)}"


def _named(value: Any) -> str:
    names = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _read_csv(path: Path, separator: str, work: Path) -> Iterator[Record]:
    """As texts: `datasets` would make 1 and NA a float and nothing."""
    from datasets import Features, Value

    header = next(csv.reader([_first_line(path)], delimiter=separator), [])
    text = Features({name: Value("string") for name in header if name})
    if not text:
        raise ConfigError(f"data.source: {path}:1: names no fields")
    rows = _stream("csv", path, work, sep=separator, keep_default_na=False, features=text)
    for number, row in enumerate(rows, start=1):
        yield Record(Place(path, number, "row"), row)


def _first_line(path: Path) -> str:
    with _open(path) as file:
        return file.readline().decode("utf-8-sig").rstrip("\r\n")


def _first_line_that_is_no_text(path: Path) -> int:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


# What other projects call them.
_ALSO = {
    "messages": ("conversations", "conversation", "dialog", "dialogue", "turns", "chat"),
    "role": ("from", "speaker"),
    "content": ("value", "text"),
    "instruction": ("prompt", "question", "query"),
    "output": ("response", "answer", "completion", "chosen"),
    "text": ("content", "body", "document"),
}


def missing(field: str, key: str, values: dict[str, Any]) -> str:
    """What to say of a record (or message) without a field; `key` is the name that data.fields
    gives it."""
    names = [str(name) for name in values]
    there = f"it has {', '.join(names)}" if names else "it has none"
    remedy = _format_of(key, names) or f"data.fields = {json.dumps(_fields(field, key, values))}"
    return f"has no field {field!r}; {there}: set {remedy}"


def _format_of(key: str, names: list[str]) -> str:
    """The format that a record of these fields is of, where it is another one."""
    if key in ("messages", "text") and {"instruction", "output"} <= set(names):
        return "data.format = 'instruction'"
    is_chat = key in ("text", "instruction", "output") and "messages" in names
    return "data.format = 'chat'" if is_chat else ""


def _fields(field: str, key: str, values: dict[str, Any]) -> list[str]:
    """Entries of data.fields by names that others use, also for the messages of a chat."""
    names = [str(name) for name in values]
    close = [name for name in (key, *_ALSO.get(key, ())) if name in names]
    close = close or difflib.get_close_matches(field, names, n=1)
    found = [f"{key}={close[0] if close else 'NAME'}"]
    turn = values if key == "role" else None
    if key == "messages" and close and isinstance(turns := values[close[0]], list) and turns:
        turn = turns[0]
    for ours in ("role", "content"):
        if isinstance(turn, dict) and ours != key and ours not in turn:
            found += [f"{ours}={name}" for name in _ALSO[ours] if name in turn][:1]
    return found
