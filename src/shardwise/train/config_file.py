"""Reads a configuration: defaults < TOML file < `--section.key value`; writes the effective one.

Every error is a `ConfigError` of one line that says where (file and line, or the option), what was
found and what to do. tyro, which draws the help, is not used for parsing: it reports errors as
boxes of several lines, and knows nothing of files and lines.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from shardwise.errors import ConfigError
from shardwise.train.config import (
    MODEL_KINDS,
    SECTIONS,
    Config,
    CustomModelConfig,
    DecoderConfig,
    OptimConfig,
    OwnOptimConfig,
    is_factory,
    sections_of,
)
from shardwise.train.config_checks import fitted_batches, ineffective, problems
from shardwise.train.optimizer_keys import OPTIMIZERS, kind_problem, own_value
from shardwise.units import counted, full_name, short_names


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration, with the place where each key was set."""

    config: Config
    path: Path | None
    origins: dict[str, _Origin]
    notes: tuple[str, ...] = ()  # what an option has left without effect in the file

    def error(self, key: str, text: str) -> ConfigError:
        return _error(self.origins.get(key), key, text)

    def on(self, num_ranks: int) -> LoadedConfig:
        """The job on that many ranks: sizes of batches that nobody has set fit them. Under
        any_world sizes make the numbers, and stay."""
        config, before = self.config, self.config.train
        if config.run.reproducible == "any_world":
            return self
        data_ranks = max(1, num_ranks // config.mesh.tensor)
        train = fitted_batches(before, data_ranks, self.origins)
        notes = self.notes
        if train.global_batch != before.global_batch:
            text = (
                f"train.global_batch: {train.global_batch} instead of {before.global_batch}, which "
                f"{counted(num_ranks, 'rank')} cannot share evenly; set it to choose"
            )
            notes = (*notes, text)
        return replace(self, config=replace(config, train=train), notes=notes)


def load_config(path: str | Path | None, overrides: Sequence[tuple[str, str]] = ()) -> LoadedConfig:
    """Reads `path` (or only the defaults), applies (`section.key`, text) overrides and checks the
    result."""
    file = Path(path) if path is not None else None
    values, origins = _read_toml(file) if file is not None else ({}, {})
    for key, text in overrides:
        key = key.replace("-", "_")
        values[key] = _Text(text)
        origins[key] = f"--{key}"
    notes: list[str] = []
    config = _build(values, origins, notes)
    for key, (cause, how) in ineffective(config).items():
        if key not in origins:
            continue
        error = _error(origins[key], key, f"has no effect: {cause} {how}")
        if not _overridden(origins, key, cause):
            raise ConfigError(f"{error}; remove it")
        notes.append(str(error))
    loaded = LoadedConfig(config, file, origins, tuple(notes))
    for key, text in problems(config):
        raise loaded.error(key, text)
    return loaded


def _overridden(origins: dict[str, _Origin], key: str, cause: str) -> bool:
    """Whether a file set `key`, and an option the other key that leaves it without effect: a note
    then, no mistake."""
    return isinstance(origins[key], _Line) and isinstance(origins.get(cause), str)


def config_as_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> key -> value of everything that has an effect; equal dicts mean equal jobs."""
    skipped = ineffective(config)
    result: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = getattr(config, name)
        if isinstance(section, CustomModelConfig):
            result[name] = {"kind": section.kind, **section.options}
            continue
        keys = (f.name for f in fields(section) if f"{name}.{f.name}" not in skipped)
        result[name] = {key: _plain(getattr(section, key)) for key in keys if key != "own"}
        if isinstance(section, OwnOptimConfig):
            result[name] |= {key: _plain(value) for key, value in section.own.items()}
    return result


def config_as_toml(config: Config) -> str:
    """The effective configuration as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    for name, section in config_as_dict(config).items():
        lines.append(f"[{name}]")
        lines += [f"{_toml_key(key)} = {toml_value(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a TOML file sets a key; looked for only when an error shows it."""

    path: Path
    text: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}:{_line_of(self.text, self.keys)}"


_Origin = _Line | str  # a line of a file, or an option


class _Text(str):
    """The text of an option, still to be read as the type of its key."""


def _error(origin: _Origin | None, key: str, text: str) -> ConfigError:
    if origin is None:
        return ConfigError(f"{key}: {text}")
    return ConfigError(f"{origin}: {text}" if origin == f"--{key}" else f"{origin}: {key}: {text}")


def _read_toml(path: Path) -> tuple[dict[str, Any], dict[str, _Origin]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"{path}: cannot be read as a TOML file: {why}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    origins: dict[str, _Origin] = {}
    for section, content in document.items():
        if not isinstance(content, dict):
            hint = nearest_key(section)
            raise ConfigError(f"{_Line(path, text, (section,))}: {section}: in no section; {hint}")
        for name, value in content.items():
            key = f"{section}.{name}"
            values[key] = value
            origins[key] = _Line(path, text, (section, name))
        if section not in SECTIONS:
            line, hint = _Line(path, text, (section,)), _nearest(section, SECTIONS)
            raise ConfigError(f"{line}: [{section}]: no such section; {hint}")
    return values, origins


def _line_of(text: str, keys: tuple[str, ...]) -> int:
    """Line of the statement that sets keys[0].keys[1]...; asks the TOML parser itself, prefix by
    prefix.

    A prefix of the file that ends inside a statement does not parse; the first that parses and
    holds the key ends with the key's statement, which began after the last prefix that parsed
    before.
    """
    lines = text.splitlines(keepends=True)
    start = 1
    for count in range(1, len(lines) + 1):
        try:
            found: Any = tomllib.loads("".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None:
            return start
        start = count + 1
    return start


def _nearest(word: str, choices: typing.Iterable[str]) -> str:
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(choices)}"


def _build(values: dict[str, Any], origins: dict[str, _Origin], notes: list[str]) -> Config:
    kind = str(values.get("model.kind", DecoderConfig.__dataclass_fields__["kind"].default))
    custom = is_factory(kind)
    if not custom and kind not in MODEL_KINDS:
        names = ", ".join(map(repr, MODEL_KINDS))
        text = f"{kind!r} is neither {names} nor 'package.module:function'"
        raise _error(origins["model.kind"], "model.kind", text)
    options: dict[str, Any] = {}
    optimizer = _optimizer_of(values, origins)
    own: dict[str, Any] = {}
    classes = sections_of(kind)
    sections: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if custom and section == "model":
            if name != "kind":
                options[name] = _toml_or_text(value) if isinstance(value, _Text) else value
            continue
        hints = typing.get_type_hints(classes[section]) if section in classes else {}
        if section == "optim" and name not in hints:
            value = _toml_or_text(value) if isinstance(value, _Text) else value
            try:
                own[name] = own_value(optimizer, name, value, hints)
            except ValueError as error:
                raise _error(origins[key], key, str(error)) from None
            continue
        if name not in hints:
            if section == "model" and _overridden(origins, key, "model.kind"):
                text = f"has no effect: model.kind is {kind!r}"
                notes.append(str(_error(origins[key], key, text)))
                continue
            if section == "model" and (other := _kind_with(name)):
                text = f"belongs to model.kind = {other!r}; model.kind is {kind!r}"
                raise _error(origins[key], key, text)
            raise _error(origins[key], key, f"unknown key; {nearest_key(key, classes)}")
        sections[section][name] = _convert(value, hints[name], key, origins[key])
    if optimizer != OptimConfig().kind:  # others have torch's defaults
        defaults = {
            k: v for k, v in OPTIMIZERS[optimizer][1].items() if k in ("betas", "weight_decay")
        }
        sections["optim"] = {**defaults, **sections["optim"]}
    sections["optim"]["kind"] = optimizer
    if own:
        classes = {**classes, "optim": OwnOptimConfig}
        sections["optim"]["own"] = own
    built: dict[str, Any] = {name: classes[name](**content) for name, content in sections.items()}
    if custom:
        built["model"] = CustomModelConfig(kind, options)
    return Config(**built)


def _optimizer_of(values: dict[str, Any], origins: dict[str, _Origin]) -> str:
    """`optim.kind`, also as torch writes it (AdamW)."""
    kind = str(values.get("optim.kind", OptimConfig().kind)).lower()
    if why := kind_problem(kind):
        raise _error(origins.get("optim.kind"), "optim.kind", why)
    return kind


def _kind_with(name: str) -> str:
    """The kind of model that has such a key; empty if none has."""
    return next((k for k, c in MODEL_KINDS.items() if any(f.name == name for f in fields(c))), "")


def nearest_key(key: str, classes: dict[str, type] = SECTIONS) -> str:
    section, _, name = key.partition(".")
    keys = [f"{s}.{f.name}" for s, cls in classes.items() for f in fields(cls)]
    if elsewhere := [k for k in keys if name and k.endswith(f".{name}")]:
        return f"did you mean {elsewhere[0]}?"
    if section in SECTIONS and name:
        return _nearest(key, [k for k in keys if k.startswith(f"{section}.")])
    if not name:  # `steps` for `train.steps`
        names = [k.partition(".")[2] for k in keys]
        close = difflib.get_close_matches(section, names, n=1)
        if close:
            return f"did you mean {keys[names.index(close[0])]}?"
    close = difflib.get_close_matches(key, keys, n=1)
    return f"did you mean {close[0]}?" if close else f"the sections are {', '.join(SECTIONS)}"


def _toml_or_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return str(text)


def _convert(value: Any, hint: Any, key: str, origin: _Origin) -> Any:
    if isinstance(value, _Text):
        value = _from_text(value, hint)
    result = _match(value, hint)
    if result is _NO_MATCH:
        shown = json.dumps(value) if isinstance(value, bool | str) else value
        why = ""
        if "bfloat16" in get_args(hint) and full_name(str(value)) == "float16":
            why = "; float16 needs a loss scaler, which the job does not have"
        raise _error(origin, key, f"expected {_describe(hint)}, found {shown}{why}")
    return result


def _from_text(text: str, hint: Any) -> Any:
    """An option's text as the TOML value that it stands for: quotes and brackets may be left
    out."""
    if hint is str or get_origin(hint) is Literal:
        return str(text)
    value = _toml_or_text(text.lower() if hint is bool else text)
    takes_list = get_origin(hint) is tuple or any(get_origin(h) is tuple for h in get_args(hint))
    if isinstance(value, str) and (get_origin(hint) is tuple or (takes_list and "," in text)):
        return [_toml_or_text(part.strip()) for part in text.split(",")]
    is_list = get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis
    return [value] if is_list and not isinstance(value, list) else value


_NO_MATCH = object()


def _match(value: Any, hint: Any) -> Any:
    """The value as that type, or _NO_MATCH: bool is no int, an int may stand for a float."""
    origin = get_origin(hint)
    if origin is Literal:
        names = [value, full_name(value)] if isinstance(value, str) else []
        return next((name for name in names if name in get_args(hint)), _NO_MATCH)
    if origin in (typing.Union, types.UnionType):
        matches = (_match(value, h) for h in get_args(hint))
        return next((m for m in matches if m is not _NO_MATCH), _NO_MATCH)
    if origin is tuple:
        return _match_tuple(value, get_args(hint))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value if type(value) is hint else _NO_MATCH


def _match_tuple(value: Any, hints: tuple[Any, ...]) -> Any:
    if not isinstance(value, list | tuple):
        return _NO_MATCH
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        return _NO_MATCH
    items = tuple(_match(v, h) for v, h in zip(value, hints, strict=True))
    return _NO_MATCH if _NO_MATCH in items else items


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        short = short_names(get_args(hint))
        names = " or ".join(repr(a) for a in get_args(hint))
        return f"{names} (short: {', '.join(short)})" if short else names
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(h) for h in get_args(hint))
    if origin is tuple:
        args = get_args(hint)
        if args[-1] is Ellipsis:
            return f"a list of {_describe(args[0])}s".replace("a list of a ", "a list of ")
        return f"a list of {len(args)} numbers"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names[hint]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _toml_key(key: str) -> str:
    return (
        key
        if key.replace("_", "").replace("-", "").isalnum() and key.isascii()
        else json.dumps(key)
    )


def toml_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items())
        return "{ " + ", ".join(pairs) + " }" if value else "{}"
    return str(value)  # numbers (repr round-trips; TOML writes inf and nan alike), dates
