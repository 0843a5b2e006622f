"""Reads a configuration file of others as plain values, and finds out whose it is. Runs nothing.

JSON (duplicate keys refused) or YAML (`safe_load`'s types; duplicate keys, anchors and aliases
refused, so that a small file cannot become a large one). Whoever knows most of the keys at the top
is whose file it is; nobody, or two alike, is an error that names them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

MAX_BYTES = 2**20
MAX_DEPTH = 50


def read_document(path: Path) -> dict[str, Any]:
    """The table in a JSON or YAML file; every mistake is a `ConfigError` of one line."""
    text = _text_of(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; expected JSON or YAML")
    is_json = path.suffix.lower() in (".json", ".hjson") or text.lstrip()[0] in "{["
    try:
        document = _json(text) if is_json else _yaml(text)
        if not isinstance(document, dict):
            kind = {list: "a list", str: "text"}.get(type(document), "a single value")
            raise ConfigError(f"holds {kind}; expected a table of keys and values")
        _check_depth(document)
    except RecursionError:
        raise ConfigError(f"{path}: tables within tables, more than {MAX_DEPTH} deep") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return document


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path}: {'is no regular file' if path.exists() else 'no such file'}")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES >> 20} MiB is no configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text in UTF-8") from None


def _json(text: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"the key {json.dumps(key)} stands twice in one table")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        hint = "; comments are no part of JSON" if "//" in text or "#" in text else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"not valid JSON: {error.msg} ({where}){hint}") from None
    except ConfigError:
        raise
    except ValueError:  # Python reads no number of more than 4,300 digits
        raise ConfigError("not valid JSON: a number with thousands of digits") from None


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("YAML needs PyYAML, which is not installed: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):
        """Safe types only, and no key twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                line = event.start_mark.line + 1
                raise ConfigError(f"line {line}: anchors and aliases are not read; write it out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            found: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
                line = key_node.start_mark.line + 1
                if key is None:
                    raise ConfigError(f"line {line}: a key that is no single value")
                if key in found:
                    raise ConfigError(f"line {line}: the key {json.dumps(key)} stands twice")
                found[key] = self.construct_object(value_node, deep=True)
            return found

    # In YAML 1.1's own resolvers keys like `on` and `1` are no text; a key is its text here.
    Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_mapping)
    try:
        return yaml.load(text, Loader)  # a SafeLoader: plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"not valid YAML: {' '.join(problem.split())}{where}") from None
    except (ValueError, OverflowError) as error:  # a date of month 13, a number of many digits
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    for below in value.values() if isinstance(value, Mapping) else ():
        _check_depth(below, depth + 1)
    for below in value if isinstance(value, list) else ():
        _check_depth(below, depth + 1)


def kind_of(document: Mapping[str, Any], known: Mapping[str, set[str]]) -> str:
    """Whose file that is: the format that knows most of its keys. `known`: format -> keys."""
    counts = {kind: len(keys & set(document)) for kind, keys in known.items()}
    best = max(counts.values())
    found = [kind for kind, count in counts.items() if count == best]
    if not best:
        names = ", ".join(json.dumps(str(key)) for key in list(document)[:4])
        said = f"none of its keys ({names}) is known" if document else "it holds no keys"
        raise ConfigError(
            f"{said}: neither DeepSpeed's, nor Accelerate's, nor the Trainer's; "
            f"--from {'|'.join(known)} says whose it is"
        )
    if len(found) > 1:
        raise ConfigError(f"may be of {' or '.join(found)}; --from {'|'.join(found)} says whose")
    return found[0]
