"""docs/fsdp2.md names every public name of torch's FSDP2, and claims nothing that is not there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as fsdp

import shardwise

PAGE = Path(__file__).parents[2] / "docs" / "fsdp2.md"
WORDS = ("same", "better", "different", "not yet")
_ROW = re.compile(r"^\| `([A-Za-z_][\w.()]*)` \| ([a-z ]+) \|(.*)\|$", re.MULTILINE)


def public_names() -> list[str]:
    """FSDP2's names: what `torch.distributed.fsdp` lists, without FSDP1's, which say where they are
    from by their module."""
    names = []
    for name in fsdp.__all__:
        thing = getattr(fsdp, name)
        if thing.__module__ != fsdp.__name__:
            continue
        names.append(name)
        if inspect.isclass(thing):
            names += [f"{name}.{member}" for member in members_of(thing)]
    names += [f"fully_shard({p})" for p in inspect.signature(fsdp.fully_shard).parameters]
    return names


def members_of(cls: type) -> list[str]:
    fields = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    own = {n for n in dir(cls) if not n.startswith("_")}
    return [*fields, *sorted(own - set(fields))]


def rows() -> dict[str, str]:
    found = _ROW.findall(PAGE.read_text())
    assert len({name for name, _, _ in found}) == len(found), "a name has two rows"
    return {name: word for name, word, _ in found}


def exists(name: str) -> bool:
    """Whether shardwise has it."""
    if (match := re.fullmatch(r"fully_shard\((\w+)\)", name)) is not None:
        return match[1] in inspect.signature(shardwise.fully_shard).parameters
    owner, _, member = name.partition(".")
    thing = getattr(shardwise, owner, None)
    if not member or thing is None:
        return thing is not None
    fields = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    return member in fields or hasattr(thing, member)


def refuses(name: str) -> bool:
    """Whether a method is there only to say that it is not."""
    owner, _, member = name.partition(".")
    thing = getattr(getattr(shardwise, owner, None), member, None)
    return callable(thing) and "raise NotImplementedError" in inspect.getsource(thing)


def parameters_of(thing: Any) -> list[tuple[str, Any, str]]:
    """Name, kind and default, without annotations; policies compare by their fields."""
    return [
        (p.name, p.kind, re.sub(r"\w+\.", "", repr(p.default)))
        for p in inspect.signature(thing).parameters.values()
    ]


def test_every_name_has_a_row() -> None:
    missing = sorted(set(public_names()) - set(rows()))
    assert not missing, f"docs/fsdp2.md lacks rows for {', '.join(missing)}"


def test_every_row_is_a_name() -> None:
    assert not set(rows()) - set(public_names())
    assert set(rows().values()) <= set(WORDS)


@pytest.mark.parametrize("name", rows())
def test_row(name: str) -> None:
    word = rows()[name]
    if word == "not yet":
        there = exists(name) and not refuses(name)
        assert not there, f"docs/fsdp2.md says 'not yet' of {name}, which exists: update it"
    else:
        assert exists(name), f"docs/fsdp2.md says '{word}' of {name}, which shardwise lacks"


@pytest.mark.parametrize("name", [n for n, word in rows().items() if word != "not yet"])
def test_arguments(name: str) -> None:
    """Arguments of torch's are ours, in order, of the same kind and default; ours may have more."""
    if "(" in name:
        return
    owner, _, member = name.partition(".")
    theirs, ours = getattr(fsdp, owner), getattr(shardwise, owner)
    if member:
        theirs, ours = getattr(theirs, member, None), getattr(ours, member, None)
        if not callable(theirs):
            return
    elif inspect.isclass(theirs) and not dataclasses.is_dataclass(theirs):
        return
    skipped = {p for p in ("dp_mesh_dims",) if rows().get(f"fully_shard({p})") == "not yet"}
    wanted = [p for p in parameters_of(theirs) if p[0] not in skipped]
    assert parameters_of(ours)[: len(wanted)] == wanted
