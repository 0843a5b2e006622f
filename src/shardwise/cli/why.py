"""What `shardwise explain` says of single keys: where a value comes from, and what it changes.

    explain --config       every key with its value, where that was set, and what has no effect
    explain --why KEY      one key: what it is for, its value and source, why it has no effect, what
                           "auto" came to, and how the plan would differ with the default

What a key changes is not written down anywhere: the plan is made again with the default in its
place, and the two are compared.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.train.config import SECTIONS, Config, CustomModelConfig, OwnOptimConfig
from shardwise.train.config_checks import ineffective, problems
from shardwise.train.config_file import LoadedConfig, nearest_key, toml_value
from shardwise.units import text_of_bytes

if TYPE_CHECKING:
    from shardwise.plan.model import PlannedModel

Plan = Callable[[Config], "PlannedModel"]
_FOLLOWS = {  # begins of the reasons that say what an "auto" came to
    "shard.strategy": "strategy ",
    "shard.unit": "unit ",
    "shard.transport": "transport ",
    "shard.gather_limit": "gathered ahead ",
    "shard.gather_wire": "wire ",
    "shard.reduce_wire": "wire ",
    "train.global_batch": "train.global_batch",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the effective configuration; `default` is None where a kind has none."""

    key: str
    value: Any
    default: Any
    source: str
    no_effect: str
    about: str

    @property
    def text(self) -> str:
        return toml_value(self.value)


def settings(loaded: LoadedConfig) -> list[Setting]:
    """All keys, in the order of the sections."""
    config, found = loaded.config, []
    without = ineffective(config)
    for name in SECTIONS:
        section = getattr(config, name)
        values: dict[str, Any] = {f.name: getattr(section, f.name) for f in fields(section)}
        values.pop("own", None)
        values |= section.own if isinstance(section, OwnOptimConfig) else {}
        if isinstance(section, CustomModelConfig):
            values = {"kind": section.kind, **section.options}
        about = documented(type(section))
        defaults = {} if isinstance(section, CustomModelConfig) else _defaults(type(section))
        for key, value in values.items():
            whole = f"{name}.{key}"
            cause = " ".join(without.get(whole, ()))
            origin = loaded.origins.get(whole)
            source = "default" if origin is None else str(origin)
            if origin is None and value != defaults.get(key, value):
                source = "follows from others"
            text = about.get(key, "")
            found.append(Setting(whole, value, defaults.get(key), source, cause, text))
    return found


def _defaults(section: type) -> dict[str, Any]:
    made = section() if section is not OwnOptimConfig else section.__mro__[1]()
    return {f.name: getattr(made, f.name) for f in fields(made)}


def documented(section: type) -> dict[str, str]:
    """The text under each key of a section, its class's bases' too."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__[:-1]):
        (node,) = ast.parse(inspect.getsource(cls)).body
        assert isinstance(node, ast.ClassDef)
        for before, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if (
                isinstance(before, ast.AnnAssign)
                and is_text
                and isinstance(before.target, ast.Name)
            ):
                found[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def why(loaded: LoadedConfig, key: str, reasons: list[str], plan: Plan) -> list[str]:
    """What there is to say of one key. ConfigError where there is no such key."""
    key = key.replace("-", "_")
    known = {setting.key: setting for setting in settings(loaded)}
    if key not in known:
        raise ConfigError(f"--why {key}: no such key; {nearest_key(key)}")
    found = known[key]
    lines = [f"{key} = {found.text}   ({found.source})"]
    if found.about:
        lines.append(f"  {found.about}")
    if found.no_effect:
        lines.append(f"  no effect: {found.no_effect}")
        return lines
    begin = _FOLLOWS.get(key)
    lines += [f"  {reason}" for reason in reasons if begin and reason.startswith(begin)]
    if found.default is None or found.value == found.default:
        is_default = found.value == found.default
        lines.append(
            "  the default" if is_default else "  a key of this kind alone, without a default"
        )
        return lines
    return [*lines, *_difference(loaded.config, found, plan)]


def _difference(config: Config, setting: Setting, plan: Plan) -> list[str]:
    """How the plan would differ with the default."""
    name, _, key = setting.key.partition(".")
    section = replace(getattr(config, name), **{key: setting.default})
    other = replace(config, **{name: section})
    default = toml_value(setting.default)
    if wrong := problems(other):
        return [f"  with {default}, the default, the rest does not go: {': '.join(wrong[0])}"]
    try:
        ours, theirs = plan(config), plan(other)
    except ConfigError as error:
        return [f"  with {default}, the default, the rest does not go: {error}"]
    numbers = [
        (what, getattr(ours, f"{what}_bytes"), getattr(theirs, f"{what}_bytes"))
        for what in ("kept", "gathered", "received", "refreshed")
    ]
    changed = [
        f"{what} {text_of_bytes(mine)} instead of {text_of_bytes(its)}"
        for what, mine, its in numbers
        if mine != its
    ]
    for what in ("units", "strategy", "wire"):
        mine, its = _seen(ours, what), _seen(theirs, what)
        if mine != its:
            changed.append(f"{what} {mine} instead of {its}")
    if not changed:
        return [f"  beside {default}, the default, a rank keeps, gathers and receives the same"]
    return [f"  beside {default}, the default: {', '.join(changed)}"]


def _seen(plan: PlannedModel, what: str) -> str:
    if what == "units":
        return str(len(plan.units))
    names = [u.strategy.name if what == "strategy" else u.wire.text for u in plan.units]
    return " and ".join(dict.fromkeys(names))
