"""What the keys of [data] mean together where `data.format` names texts: fields, tokenizer, and
which keys have no effect. Imports nothing heavy, since `--help` passes here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.train.config import Config, DataConfig

# What a record holds in each format, and the names that its fields have unless data.fields differs.
FIELDS: dict[str, dict[str, str]] = {
    "text": {"text": "text"},
    "chat": {"messages": "messages", "role": "role", "content": "content"},
    "instruction": {"instruction": "instruction", "input": "input", "output": "output"},
}
_OF_TEXTS = ("fields", "tokenizer", "chat_template", "system", "overlong", "invalid", "packing")
_OF_CHATS = ("chat_template", "system")


def has_texts(data: DataConfig) -> bool:
    """Whether samples come from texts, by a tokenizer."""
    return data.format != "tokens"


def fields_of(data: DataConfig) -> dict[str, str]:
    """The names of the fields in the files; ValueError for an entry that means nothing."""
    found = dict(FIELDS[data.format])
    for entry in data.fields:
        ours, equals, theirs = (part.strip() for part in entry.partition("="))
        if not equals or not theirs or ours not in found:
            names = ", ".join(f"{name}=NAME" for name in found)
            raise ValueError(f"{entry!r}: data.format = {data.format!r} takes {names}")
        found[ours] = theirs
    return found


def tokenizer_dir(config: Config) -> Path | None:
    """`data.tokenizer`, else where the model's own lies."""
    named = config.data.tokenizer or getattr(config.model, "path", "")
    path = Path(named).expanduser() if named else None
    return path.parent if path is not None and path.is_file() else path


def download_hint(path: Path) -> str:
    """For a name on a model hub, as other programs take it."""
    name = str(path)
    is_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    return f"; nothing is downloaded: hf download {name} --local-dir {name}" if is_name else ""


def overlong_of(data: DataConfig) -> str:
    """What `auto` stands for."""
    if data.overlong != "auto":
        return data.overlong
    return "split" if data.format == "text" else "truncate"


def text_ineffective(data: DataConfig, is_factory: bool) -> dict[str, tuple[str, str]]:
    """Keys that have no effect, why: of texts where there are none, of chats where there are
    texts."""
    if is_factory:
        keys, cause = ("format", *_OF_TEXTS), "data.source"
        how = f"is {data.source!r}, which makes its own samples"
    elif not has_texts(data):
        keys, cause, how = _OF_TEXTS, "data.format", "is 'tokens'"
    elif data.format == "text":
        keys, cause, how = _OF_CHATS, "data.format", "is 'text'"
    else:
        return {}
    return {f"data.{key}": (cause, how) for key in keys}


def text_problems(config: Config) -> list[tuple[str, str]]:
    """What is wrong with keys of texts, as far as can be told without reading a file."""
    data = config.data
    if not has_texts(data):
        return []
    found: list[tuple[str, str]] = []
    if data.source == "stdlib":
        text = f"name the files of data.format = {data.format!r}; 'stdlib' is read as bytes"
        found.append(("data.source", text))
    if config.model.kind == "decoder":
        text = (
            "reads tokens; data.format = 'tokens', or a model of transformers (model.kind = 'hf')"
        )
        found.append(("model.kind", f"decoder {text}"))
    elif tokenizer_dir(config) is None:
        found.append(("data.tokenizer", "name the directory of the model's tokenizer"))
    if data.overlong == "split" and data.format != "text":
        text = (
            f"split is for data.format = 'text'; a {data.format} is truncated, dropped or refused"
        )
        found.append(("data.overlong", text))
    if data.seq_len < 2:
        found.append(("data.seq_len", "a token needs one before it to be trained; use 2 or more"))
    try:
        fields_of(data)
    except ValueError as error:
        found.append(("data.fields", str(error)))
    return found


def settings_of(data: DataConfig) -> dict[str, Any]:
    """Everything of [data] that decides which tokens come out of the same files."""
    return {
        "format": data.format,
        "fields": fields_of(data),
        "system": data.system,
        "overlong": overlong_of(data),
        "invalid": data.invalid,
        "packing": data.packing,
        "seq_len": data.seq_len,
        "held_out": data.held_out,
    }
