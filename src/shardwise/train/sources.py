"""The files that `data.source` names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwise.errors import ConfigError


def files_named(
    source: str | tuple[str, ...], inside: Callable[[Path], list[Path]], none: str
) -> list[Path]:
    """Each once; `inside` gives those of a directory that count, in order, and `none` says of one
    that has none what it lacks (with `{path}`).
    """
    found: list[Path] = []
    for name in (source,) if isinstance(source, str) else source:
        path = Path(name).expanduser()
        if path.is_dir():
            there = inside(path)
            if not there:
                raise ConfigError(f"data.source: {none.format(path=path)}")
            found += there
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"data.source: {name}: no such file or directory")
    return list({path.resolve(): path for path in found}.values())
