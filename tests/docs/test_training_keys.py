"""The tables of keys in docs/training.md are made from train/config.py.

python tests/docs/test_training_keys.py      writes them anew
"""

from __future__ import annotations

import re
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from shardwise.cli.why import documented
from shardwise.train import config
from shardwise.train.config_file import load_config

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
_PLACE = re.compile(r"(?<=<!-- keys: begin -->\n).*(?=<!-- keys: end -->)", re.DOTALL)


def tables() -> str:
    """One table for each section: key, type, default, and the text under the key."""
    parts = []
    sections = list(config.SECTIONS.items())
    sections[2:2] = [
        ("model", cls) for kind, cls in config.MODEL_KINDS.items() if kind != "decoder"
    ]
    for section, cls in sections:
        texts = documented(cls)
        hints = typing.get_type_hints(cls)
        other = cls is not config.SECTIONS[section]
        title = f"[{section}], kind {cls().kind}" if other else f"[{section}]"
        lines = [f"### {title}\n", "| key | type | default | meaning |", "|---|---|---|---|"]
        for field in fields(cls):
            key = f"`{section}.{field.name}`"
            kind = type_in_words(hints[field.name]).replace("|", "\\|")
            lines.append(f"| {key} | {kind} | `{shown(field.default)}` | {texts[field.name]} |")
        parts.append("\n".join(lines) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def type_in_words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(h) for h in get_args(hint))
    if origin is tuple:
        args = get_args(hint)
        word = type_in_words(args[0])
        return f"list of {word}s" if args[-1] is Ellipsis else f"list of {len(args)} {word}s"
    return {str: "string", int: "integer", float: "number", bool: "true, false"}[hint]


def shown(value: Any) -> str:
    """A default as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_tables_are_those_of_the_code() -> None:
    found = _PLACE.search(PAGE.read_text())
    assert found is not None and found[0] == tables(), (
        f"run: python tests/docs/{Path(__file__).name}"
    )


def test_every_default_is_what_a_run_uses() -> None:
    loaded = load_config(None).config
    for section, cls in config.SECTIONS.items():
        for field in fields(cls):
            assert getattr(getattr(loaded, section), field.name) == field.default


if __name__ == "__main__":
    PAGE.write_text(_PLACE.sub(lambda _: tables(), PAGE.read_text()))
