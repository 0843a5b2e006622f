"""What a file says, until it has been checked.

A `Said` is a value that others wrote and where it stands. It gives out what it was asked for, of
that type, or CheckpointError with the place. So what a format says is checked once, as a whole, and
nothing behind that meets a value of an unknown type. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

from shardwise.checkpoint.bounded import counts, shape_of, short
from shardwise.errors import CheckpointError

T = TypeVar("T")


class Record:
    """What stands for an object of a class that is not to be loaded: its arguments and state, as
    the file has them."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made


def records(module: str, *names: str) -> dict[tuple[str, str], type[Record]]:
    """Records for the classes of a module, under their names."""
    return {(module, n): type(n, (Record,), {"__slots__": ()}) for n in names}


class Said:
    """`value` is for those who can take any; `where` is a file, or what holds this under `key`."""

    __slots__ = ("_key", "_where", "value")

    def __init__(self, value: Any, where: str | Said, key: Any = None) -> None:
        self.value, self._where, self._key = value, where, key

    def __str__(self) -> str:
        here = self._key if isinstance(self._key, str) else short(self._key)
        return f"{self._where}: {here}" if isinstance(self._where, Said) else self._where

    def wrong(self, expected: str) -> CheckpointError:
        return CheckpointError(f"{self}: expected {expected}, found {short(self.value)}")

    def of(self, kind: type[T]) -> T:
        """A value of that type; truth values are no numbers."""
        if not isinstance(self.value, kind) or (isinstance(self.value, bool) and kind is not bool):
            raise self.wrong(f"a {kind.__name__}")
        return self.value

    def text(self) -> str:
        """A string that can be written."""
        if any("\ud800" <= c <= "\udfff" for c in self.of(str)):
            raise self.wrong("text")
        return self.value

    def count(self) -> int:
        return counts([self.value], str(self))[0]

    def counts(self, length: int) -> tuple[int, ...]:
        return counts(self.value, str(self), length)

    def shape(self) -> tuple[int, ...]:
        return shape_of(self.value, str(self))

    def parts(self) -> list[Said]:
        if not isinstance(self.value, list | tuple):
            raise self.wrong("a list")
        return [Said(v, self, i) for i, v in enumerate(self.value)]

    def entries(self) -> dict[str, Said]:
        """A dictionary whose keys are names."""
        return {Said(k, self, k).text(): Said(v, self, k) for k, v in self.of(dict).items()}

    def fields(self, *keys: str) -> list[Said]:
        """What a dictionary has under these keys, and it must have no others."""
        if self.of(dict).keys() != set(keys):
            raise self.wrong(f"the keys {sorted(keys)}")
        return [Said(self.value[key], self, key) for key in keys]

    def get(self, key: Any, default: Any = None) -> Said:
        """What a dictionary has under a key; None counts as nothing."""
        value = self.of(dict).get(key)
        return Said(default if value is None else value, self, key)

    def at(self, key: Any) -> Said:
        if (found := self.get(key)).value is None:
            raise CheckpointError(f"{self}: has no {key}")
        return found

    @property
    def kind(self) -> str:
        """The name of the class that a record stands for."""
        return type(self.value).__name__ if isinstance(self.value, Record) else ""

    def record(self, kind: str) -> Said:
        """The state of an object of the class of that name."""
        if self.kind != kind:
            raise self.wrong(f"a {kind}")
        return Said(self.value.state, self, kind)
