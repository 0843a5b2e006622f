"""`shardwise explain`: which units a job will have, what each costs, and why. Runs nothing.

Takes the arguments of `train`; the model is built on the meta device where its factory allows it.
Exit codes: 0, 2 a mistake (one line on stderr). With --json one object on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.layout import strategy_named
from shardwise.train.command import parse
from shardwise.train.config import Config, gather_limit, resolved_strategy
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig, load_config
from shardwise.train.optimizer_keys import OF_WHOLES
from shardwise.train.wire_keys import is_wired
from shardwise.units import counted, text_of_bytes

if TYPE_CHECKING:
    from shardwise.plan.model import PlannedModel, PlannedUnit

_HELP = """usage: shardwise explain [CONFIG.toml] [--section.key value ...] [--nproc N]
                         [--config | --why KEY | --schedule] [--json]
                         [--picture FILE]

Shows the units that `shardwise train` would make with the same arguments: what is gathered
together, under which strategy and transport, and what it costs a rank in memory and
communication. Nothing is run and nothing is allocated. --nproc defaults to 2.

--config     every key of the job instead: its value, where that was set, why it has no effect
--why KEY    one key instead (several with more --why): what it is for, where its value comes from,
             why it has no effect, and what it changes beside its default
--schedule   one step as the engine will execute it: AG gather issued, F forward, FR released,
             B backward begins, RS reduction issued, G gradients delivered, HG shards that
             replicas share out are gathered; and what a rank holds at most
--picture    with --schedule: the same as a picture (.svg, .png or .pdf), memory below it"""


def main(arguments: Sequence[str]) -> int:
    """Runs `explain` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    as_json, shows_config = "--json" in arguments, "--config" in arguments
    try:
        own = ("--json", "--config", "--schedule")
        rest, keys = _taken([a for a in arguments if a not in own], "--why", "shard.strategy")
        rest, pictures = _taken(rest, "--picture", "step.svg")
        if pictures and "--schedule" not in arguments:
            raise ConfigError("--picture: is one of a step; it needs --schedule too")
        parsed = parse(rest, flags=["json", "config", "why", "schedule"])
        loaded = load_config(parsed.config_file, parsed.overrides)
        num_ranks = parsed.nproc or 2
        loaded = loaded.on(num_ranks)
        for key, text in world_problems(loaded.config, num_ranks):
            raise loaded.error(key, text)
        if shows_config:
            _print_config(loaded, as_json=as_json)
            return 0
        if "--schedule" in arguments:
            _print_schedule(loaded, num_ranks, pictures, as_json=as_json)
            return 0
        plan, why = _plan(loaded, num_ranks)
        about = {key: _why(loaded, key, why, num_ranks) for key in keys}
    except ConfigError as error:
        print(f"shardwise explain: {error}", file=sys.stderr)
        return 2
    if about:
        lines = [line for said in about.values() for line in said]
        print(json.dumps(about) if as_json else "\n".join(lines))
    elif as_json:
        print(json.dumps(_as_json(plan, why, num_ranks)))
    else:
        _print(plan, why, num_ranks)
    return 0


def _taken(arguments: Sequence[str], option: str, example: str) -> tuple[list[str], list[str]]:
    """The arguments without `option VALUE`, and these values."""
    rest: list[str] = []
    values: list[str] = []
    left = list(arguments)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if name != option:
            rest.append(name + equals + value)
            continue
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else ""
        if not value:
            raise ConfigError(f"{option}: needs a value ({option} {example})")
        values.append(value)
    return rest, values


def _why(loaded: LoadedConfig, key: str, reasons: list[str], num_ranks: int) -> list[str]:
    from shardwise.cli.why import why

    return why(loaded, key, reasons, lambda config: _plan_of(loaded, config, num_ranks))


def _print_config(loaded: LoadedConfig, *, as_json: bool) -> None:
    from shardwise.cli.why import settings
    from shardwise.train.columns import Column, console_of, print_columns

    found = settings(loaded)
    if as_json:
        rows = [
            {"key": s.key, "value": s.value, "source": s.source, "no_effect": s.no_effect}
            for s in found
        ]
        print(json.dumps(rows))
        return
    columns = [
        Column("key", [s.key for s in found], is_number=False),
        Column("value", [s.text for s in found], is_number=False),
        Column("from", [s.source for s in found], is_number=False),
        Column("no effect, because", [s.no_effect for s in found], is_number=False),
    ]
    print_columns(console_of(sys.stdout), "The effective configuration", columns)


def _print_schedule(
    loaded: LoadedConfig, num_ranks: int, pictures: Sequence[str], *, as_json: bool
) -> None:
    import torch

    from shardwise.cli import picture
    from shardwise.train.model import build_model, plan_of
    from shardwise.train.planned import Traces, step_of
    from shardwise.train.tensor_axis import part_of_rank

    for path in pictures:
        picture.check(Path(path))
    config = loaded.config
    on_accelerator = config.run.device != "cpu" and torch.cuda.is_available()
    built = build_model(config, _folder(loaded))
    model = part_of_rank(built, config)
    plan = plan_of(model, config, num_ranks, on_accelerator=on_accelerator)
    step = step_of(plan, config, num_ranks, Traces(model), on_accelerator=on_accelerator)
    walk, peak = step.walk, step.walk.peak
    for path in pictures:
        picture.draw(walk, Path(path))
    if as_json:
        events = [{"code": event.code, "unit": event.unit} for event in walk.events]
        at_peak = {"moment": peak.moment, "unit": peak.unit, **peak.parts}
        print(json.dumps({"events": events, "peak": at_peak, "is_known": step.is_known}))
        return
    at = next((i for i, event in enumerate(walk.events) if event.code == "B"), len(walk.events))
    for name, events in (("forward", walk.events[:at]), ("backward", walk.events[at:])):
        print(f"{name}:")
        for event in events:
            print(f"  {event.code:<3} {event.unit}")
    parts = ", ".join(f"{k} {text_of_bytes(size)}" for k, size in peak.parts.items() if size)
    where = f" of {peak.unit}" if peak.unit else ""
    print(
        f"A rank holds at most {text_of_bytes(peak.total)}, in the {peak.moment}{where}: {parts}."
    )
    if not step.is_known:
        print("The model's forward tells nothing without values: units are taken one by one.")


def _plan(loaded: LoadedConfig, num_ranks: int) -> tuple[PlannedModel, list[str]]:
    from shardwise.train.model import build_model
    from shardwise.train.tensor_axis import tensor_lines

    plan, config = _plan_of(loaded, loaded.config, num_ranks), loaded.config
    lines = _reasons(loaded, plan)
    if config.mesh.tensor > 1:
        lines += tensor_lines(build_model(config, _folder(loaded)), config)
    return plan, [*loaded.notes, *lines]


def _folder(loaded: LoadedConfig) -> Any:
    return loaded.path.parent if loaded.path else None


def _plan_of(loaded: LoadedConfig, config: Config, num_ranks: int) -> PlannedModel:
    from shardwise.train.model import build_model, plan_of
    from shardwise.train.tensor_axis import part_of_rank

    model = build_model(config, _folder(loaded))
    return plan_of(part_of_rank(model, config), config, num_ranks)


def _reasons(loaded: LoadedConfig, plan: PlannedModel) -> list[str]:
    shard = loaded.config.shard
    if shard.unit == "auto" and loaded.config.model.kind == "hf":
        unit = (
            "unit auto: the decoder layers, as the model itself names them; the root takes the rest"
        )
    elif shard.unit == "auto":
        unit = (
            "unit auto: blocks that repeat a class; small neighbours share a unit; an embedding or "
            "head that outweighs the blocks gets its own; the root takes the rest"
        )
    else:
        unit = f"unit {shard.unit!r}: as asked for"
    transport = f"transport {shard.transport}: as asked for"
    if shard.transport == "auto" and is_wired(loaded.config):
        transport = "transport auto: c10d, which takes wire formats"
    elif shard.transport == "auto":
        transport = (
            "transport auto: shared memory where all ranks run on the CPU of one host and can "
            "read each other's memory, else c10d (Gloo, NCCL)"
        )
    strategy = resolved_strategy(loaded.config)
    source = "auto: by mesh.replicate" if shard.strategy == "auto" else "as asked for"
    limit = gather_limit(loaded.config)
    ahead = f"up to {text_of_bytes(limit)}" if limit else "one unit ahead"
    sizes = f"{counted(plan.replicas, 'replica')} x {counted(plan.world, 'shard')}"
    return [
        unit,
        transport,
        *wire_lines(plan),
        f"strategy {strategy}: {source}; {sizes}",
        *_holding(loaded.config, plan),
        f"gathered ahead of use: {ahead} on accelerators, nothing on CPU",
    ]


def _holding(config: Config, plan: PlannedModel) -> list[str]:
    """In which dtypes, and whose the optimizer's state is."""
    buckets = [bucket for unit in plan.units for bucket in unit.layout.buckets]
    kept, gathered, reduced = (
        " and ".join(sorted({str(d).removeprefix("torch.") for d in found}))
        for found in zip(*((b.dtype, b.gather_dtype, b.reduce_dtype) for b in buckets), strict=True)
    )
    where = "each rank's, for its shards"
    if config.optim.kind in OF_WHOLES:
        where = "a matrix' owner's, who alone steps it"
    elif strategy_named(resolved_strategy(config)).shard is None:
        where = "every rank's, for the whole model"
    if config.offload.optimizer == "cpu" or config.offload.parameters == "cpu":
        where += ", in host memory"
    elif config.offload.optimizer == "nvme":
        where += f", in files below {config.offload.directory}"
    if config.offload.parameters == "cpu":
        where += " with the shards"
    return [f"dtypes: kept in {kept}, gathered in {gathered}, reduced in {reduced}",
            f"optimizer {config.optim.kind}: its state is {where}"]  # fmt: skip


def wire_lines(plan: PlannedModel) -> list[str]:
    """What travels in another way than usual, and the error that it brings."""
    found = []
    for wire in dict.fromkeys(unit.wire for unit in plan.units if not unit.wire.is_plain):
        again = ", and so is the sum over replicas" if plan.replicas > 1 else ""
        again = again if wire.reduce != "exact" else ""
        found.append(f"wire {wire.text}: over process groups; {wire.error}{again}")
    return found


def _row(unit: Any) -> dict[str, Any]:
    return {
        "unit": unit.name,
        "modules": list(unit.modules),
        "parameters": unit.numel,
        "strategy": unit.strategy.name,
        "transport": unit.transport,
        "wire": unit.wire.text,
        "kept_bytes": unit.kept_bytes,
        "gathered_bytes": unit.layout.full_bytes,
        "collectives": len(unit.collectives),
        "received_bytes": unit.received_bytes,
        "refreshed_bytes": unit.refreshed_bytes,
    }


def _as_json(plan: PlannedModel, why: list[str], num_ranks: int) -> dict[str, Any]:
    return {
        "ranks": num_ranks,
        "replicas": plan.replicas,
        "shards": plan.world,
        "units": [_row(unit) for unit in plan.units],
        "kept_bytes": plan.kept_bytes,
        "gathered_bytes": plan.gathered_bytes,
        "received_bytes": plan.received_bytes,
        "refreshed_bytes": plan.refreshed_bytes,
        "why": why,
    }


def _print(plan: PlannedModel, why: list[str], num_ranks: int) -> None:
    from shardwise.train.columns import Column, console_of, print_columns

    rows = [(label, units[0]) for label, units in _runs(plan.units)]
    kinds = [
        u.strategy.name + ("" if u.transport == "auto" else f", {u.transport}") for _, u in rows
    ]
    columns = [Column("unit", [label for label, _ in rows], is_number=False)]
    if len(set(kinds)) > 1:
        columns.append(Column("strategy", kinds, is_number=False))
    if any(not u.wire.is_plain for _, u in rows):
        columns.append(Column("wire", [u.wire.text for _, u in rows], is_number=False))
    for name, cells in (
        ("parameters", [f"{u.numel:,}" for _, u in rows]),
        ("kept", [text_of_bytes(u.kept_bytes) for _, u in rows]),
        ("gathered", [text_of_bytes(u.layout.full_bytes) for _, u in rows]),
        ("collectives", [str(len(u.collectives)) for _, u in rows]),
        ("received", [text_of_bytes(u.received_bytes) for _, u in rows]),
    ):
        columns.append(Column(name, cells))
    console = console_of(sys.stdout)
    each = ", numbers of each" if len(rows) < len(plan.units) else ""
    title = f"{counted(len(plan.units), 'unit')} on {counted(num_ranks, 'rank')}{each}"
    print_columns(console, title, columns)
    refreshed = plan.refreshed_bytes
    once = f" and {text_of_bytes(refreshed)} per optimizer step" if refreshed else ""
    console.print(
        f"A rank keeps {text_of_bytes(plan.kept_bytes)} (parameters, gradients, optimizer state), "
        f"gathers at most {text_of_bytes(plan.gathered_bytes)} at a time, and receives "
        f"{text_of_bytes(plan.received_bytes)} per micro-batch{once}. Activations come on top."
    )
    for line in why:
        console.print(f"- {line}", markup=False)


def _runs(units: Sequence[PlannedUnit]) -> list[tuple[str, list[PlannedUnit]]]:
    """Equal units that are numbered one after the other as one: `layers.0-31 x 32`."""
    runs: list[list[PlannedUnit]] = []
    for unit in units:
        run = next((run for run in runs if _goes_on(run[-1], unit)), None)
        if run is None:
            runs.append(run := [])
        run.append(unit)
    return [(_label(run), run) for run in runs]


def _goes_on(before: PlannedUnit, unit: PlannedUnit) -> bool:
    costs = [
        {k: v for k, v in _row(u).items() if k not in ("unit", "modules")} for u in (before, unit)
    ]
    return costs[0] == costs[1] and _span([*before.modules, *unit.modules]) is not None


def _label(run: list[PlannedUnit]) -> str:
    modules = [name for unit in run for name in unit.modules]
    times = f" x {len(run)}" if len(run) > 1 else ""
    more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    return (_span(modules) or (run[0].name + more)) + times


def _span(names: list[str]) -> str | None:
    """`layers.0-3` of `layers.0`, ..., `layers.3`; None where they are not numbered like that."""
    parts = [name.split(".") for name in names]
    for at, number in enumerate(parts[0]):
        rest = {(*p[:at], "", *p[at + 1 :]) for p in parts}
        numbers = [int(p[at]) if p[at:] and p[at].isdecimal() else -1 for p in parts]
        follow = list(range(numbers[0], numbers[0] + len(names)))
        if len(rest) == 1 and number.isdecimal() and numbers == follow and len(names) > 1:
            return ".".join([*parts[0][:at], f"{numbers[0]}-{numbers[-1]}", *parts[0][at + 1 :]])
    return None
