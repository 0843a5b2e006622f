"""`shardwise plan`: which strategy fits these devices, before there are any. Runs nothing.

    shardwise plan job.toml --gpus 2x24GB        every strategy, with and without recomputation
    shardwise plan models/mine --gpus 8xh100     a directory of transformers, or its config.json
    shardwise plan --params 14e9 --gpus 64       from a number of parameters alone

Memory is the most of a step that is walked as the engine executes it, with the model's own forward
and backward on fake tensors; the moment and the unit of the peak are told. Received is what a rank
takes in for a micro-batch whose gradients are reduced. Times are those of `cli.times`.
Of what fits, and is about as fast as the fastest, that is recommended which recomputes
nothing, offloads nothing and rounds nothing, then receives least, then needs least.
Exit codes: 0, also where nothing fits; 1 where --dry-run differs; 2 a mistake (a line on stderr).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.times import Clock
from shardwise.errors import ConfigError
from shardwise.plan.hardware import (
    DEVICES,
    memory_of,
    parse_gpus,
    read_hardware,
)
from shardwise.train.command import parse
from shardwise.train.config import Config, own_keys
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig, load_config
from shardwise.train.optimizer_keys import num_states
from shardwise.units import counted, full_name, text_of_bytes

if TYPE_CHECKING:
    from shardwise.plan.model import PlannedModel, PlannedUnit
    from shardwise.plan.simulate import StepTime
    from shardwise.plan.walk import Walk
    from shardwise.train.columns import Column

_HELP = """usage: shardwise plan [CONFIG.toml | DIR | config.json] [--gpus N | NxMEMORY | NxNAME]
                      [--hardware NAME | FILE] [--link NAME | GB/s]
                      [--section.key value ...] [--groupings "auto,64MiB,Block"] [--all]
                      [--json] [--dry-run]
       shardwise plan --params NUMBER [--units N] [--tokens N] [--dtype bf16] [--compute fp32]
                      [--gpus ...]

Shows what each strategy needs on each device, what fits, and which to take. Nothing is run. Where
the device has a name, or a file of shardwise doctor --save has measured CPU ranks, how long a step
takes too, and how much of it waits for communication; --link: between the devices of a host
(pcie4, nvlink, 12.5 GB/s), else what such devices have.
--gpus 2x24GB, 8xh100: devices and the memory of each; without memory that of --hardware (a name, or
a file of shardwise doctor --save), else of this machine. --params 14e9: a model of that many
parameters in --units equal units (32), kept in --dtype (float32) and computed in --compute
(bfloat16); activations are not known then, and steps are those of --tokens a device (8192). --all
shows every choice, not only those that no other one beats in memory, bytes received, recomputation,
offload and rounding. --groupings: values of shard.unit to compare. --dry-run: the engine itself
takes a step of the job as rank 0 of that many devices, in this process, on CPU, and its bytes are
compared with the plan's."""

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "parameters")
WIRES = ("exact", "bf16", "int8")
GROUP = 8  # ranks of a group of `hybrid_shard`: those of one host
_OWN = ("gpus", "hardware", "link", "params", "units", "tokens", "dtype", "compute", "groupings")
ALIKE = 1.05
TOKENS = 8192  # of a micro-batch on a device, where nobody says


_OF_ROWS = ("room", "is_compared")  # what no reader of one needs


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank needs under one choice: bytes, the most of each kind; None: not known."""

    strategy: str
    recompute: str
    offload: str  # what lies in host memory: none, optimizer, parameters
    wire: str  # what travels: exact, bf16, int8
    unit: str  # what is gathered together, as shard.unit says it
    ranks: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    buffer_bytes: int
    activation_bytes: int | None
    logits_bytes: int | None
    host_bytes: int
    peak_bytes: int
    peak_moment: str
    peak_unit: str
    at_peak: dict[str, int]
    comm_bytes: int
    between_bytes: int  # of these, from other hosts
    room: int
    step_s: float | None = None
    exposed_s: float | None = None
    is_compared: bool = False  # with other groupings

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.room

    @property
    def costs(self) -> tuple[int, ...]:
        """What is to be small: no other row may be better in one and worse in none."""
        return (
            self.peak_bytes,
            self.comm_bytes,
            RECOMPUTE.index(self.recompute),
            OFFLOAD.index(self.offload),
            WIRES.index(self.wire),
        )

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__ if name not in _OF_ROWS}
        return found | {"fits": self.fits}

    def __str__(self) -> str:
        how = [] if self.recompute == "none" else [f"recomputation ({self.recompute})"]
        how += [] if self.offload == "none" else [f"{self.offload} in host memory"]
        how += [] if self.wire == "exact" else [f"{self.wire} on the wire"]
        how += [f"shard.unit = {self.unit!r}"] if self.is_compared else []
        return f"{self.strategy}{' with ' if how else ''}{' and '.join(how)}"


def best_of(rows: Sequence[Row]) -> list[Row]:
    """Those that no other row beats."""
    return [row for row in rows if not any(_beats(other, row) for other in rows)]


def _beats(one: Row, other: Row) -> bool:
    pairs = list(zip(one.costs, other.costs, strict=True))
    return one.costs != other.costs and all(a <= b for a, b in pairs)


def main(arguments: Sequence[str]) -> int:
    """Runs `plan` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    try:
        own, rest = _split(arguments)
        as_json, shows_all = "--json" in rest, "--all" in rest
        rest = [word for word in rest if word not in ("--json", "--all")]
        devices = _devices(own.get("gpus"), own.get("hardware"))
        ranks, room = devices.ranks, devices.room
        clock = Clock(own, GROUP)
        if "--dry-run" in rest:
            return _dry_run(own, [w for w in rest if w != "--dry-run"], devices, as_json=as_json)
        if "params" in own:
            rows, notes, change = _of_count(own, rest, ranks, room, clock)
        else:
            rows, notes, change = _of_config(own, rest, devices, clock)
    except ConfigError as error:
        print(f"shardwise plan: {error}", file=sys.stderr)
        return 2
    best = recommended(rows)
    if as_json:
        best_rows = best_of(rows)
        listed = [row.as_json() | {"is_beaten": row not in best_rows} for row in rows]
        found = {"rows": listed, "room_bytes": room, "notes": notes}
        print(json.dumps(found | {"recommended": best and best.as_json(), "change": change}))
    else:
        _print(rows if shows_all else best_of(rows), room, notes, _advice(rows, best, change))
        if not shows_all and (left_out := len(rows) - len(best_of(rows))):
            print(f"{counted(left_out, 'choice')} that others beat: --all shows them too")
    return 0


def _dry_run(own: dict[str, str], rest: list[str], devices: _Devices, *, as_json: bool) -> int:
    """The job as it is configured, by the engine itself; 1 where the plan differs from it."""
    from shardwise.cli.dry_run import dry_run

    if "params" in own:
        raise ConfigError("--dry-run: needs a job; a number of parameters (--params) has no model")
    loaded = _load(rest).on(devices.ranks)
    for key, text in world_problems(loaded.config, devices.ranks):
        raise loaded.error(key, text)
    found = dry_run(loaded.config, devices.ranks, loaded.path.parent if loaded.path else None)
    is_equal = all(each.is_equal for each in found)
    if as_json:
        kinds = {e.kind: {"planned": e.planned, "counted": e.counted} for e in found}
        print(json.dumps({"ranks": devices.ranks, "is_equal": is_equal, "bytes": kinds}))
        return int(not is_equal)
    from shardwise.train.columns import Column, console_of, print_columns

    columns = [
        Column("bytes of", [each.kind for each in found], is_number=False),
        Column("planned", [f"{each.planned:,}" for each in found]),
        Column("counted", [f"{each.counted:,}" for each in found]),
        Column("", ["" if e.is_equal else "DIFFERS" for e in found], is_number=False),
    ]
    print_columns(console_of(sys.stdout), f"rank 0 of {devices.ranks}, a step", columns)
    print("The plan is what the engine does." if is_equal else "The plan differs from the engine.")
    return int(not is_equal)


def recommended(rows: Sequence[Row]) -> Row | None:
    """Of what fits; None where nothing does. Steps that differ by less than the simulator can tell
    are equal.
    """
    fitting = [row for row in rows if row.fits]
    times = [row.step_s for row in fitting if row.step_s is not None]
    if times:
        fitting = [row for row in fitting if (row.step_s or 0) <= min(times) * ALIKE]

    def order(row: Row) -> tuple[int, ...]:
        peak, received, recompute, offload, wire = row.costs
        return wire, offload, recompute, received, peak

    return min(fitting, key=order, default=None)


# -- arguments -----------------------------------------------------------------------------------
def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options of our own, and the rest: a file and keys of the job."""
    own: dict[str, str] = {}
    rest, words = [], list(arguments)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key not in _OWN:
            rest.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{key}: needs a value (--{key} VALUE)")
            value = words.pop(0)
        own[key] = value
    return own, rest


@dataclass(frozen=True, slots=True)
class _Devices:
    ranks: int
    room: int
    are_accelerators: bool = True


def _devices(text: str | None, hardware: str | None) -> _Devices:
    try:
        ranks, memory = parse_gpus(text or "2")
    except ValueError as error:
        raise ConfigError(f"--gpus: {error}") from None
    if hardware is not None:
        if memory is not None:
            raise ConfigError("--hardware: --gpus says the memory already; give it a number alone")
        return _of_hardware(hardware, ranks if text else None)
    if memory is None:
        import torch

        from shardwise.train.hf.room import room_on

        has_gpu = torch.cuda.is_available()
        room = room_on(torch.device("cuda" if has_gpu else "cpu"))
        memory = room if has_gpu else room // ranks
        return _Devices(ranks, memory, has_gpu)
    return _Devices(ranks, memory)


def _of_hardware(text: str, ranks: int | None) -> _Devices:
    try:
        if text.lower() in DEVICES:
            return _Devices(ranks or 1, memory_of(text))
        path = Path(text)
        if not path.exists():
            raise ValueError(f"{text}: no such file, and no device of {', '.join(DEVICES)}")
        kind, count, memory = read_hardware(path)
    except ValueError as error:
        raise ConfigError(f"--hardware: {error}") from None
    ranks = ranks or (2 if kind == "cpu" else count)
    is_cpu = kind == "cpu"
    return _Devices(ranks, memory // ranks if is_cpu else memory, not is_cpu)


def _number(own: dict[str, str], key: str, default: str) -> int:
    try:
        number = int(float(own.get(key, default)))
    except (ValueError, OverflowError):
        number = 0
    if not 1 <= number <= 10**15:
        raise ConfigError(f"--{key}: {own.get(key)!r}: expected a number from 1, like 32 or 14e9")
    return number


# -- from a count --------------------------------------------------------------------------------
def _of_count(
    own: dict[str, str], rest: list[str], ranks: int, room: int, clock: Clock
) -> tuple[list[Row], list[str], str]:
    import torch

    from shardwise.plan.count import plan_count
    from shardwise.plan.walk import Way, plain_trace, walk

    if "groupings" in own:
        raise ConfigError("--groupings: goes with a job; --params has equal units (--units N)")
    if rest:
        raise ConfigError(f"{rest[0]}: --params stands for the model; leave out one of the two")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    dtypes = []
    for key, default in (("dtype", "float32"), ("compute", "bfloat16")):
        text = own.get(key, default)
        if full_name(text) not in known:
            raise ConfigError(f"--{key}: there are float32 and bfloat16, found {text!r}")
        dtypes.append(known[full_name(text)])
    num_params, num_units = _number(own, "params", ""), _number(own, "units", "32")
    if num_units > min(num_params, 10_000):
        raise ConfigError(f"--units: {num_units} units of {num_params} parameters")
    tokens = _number(own, "tokens", str(TOKENS))
    rows = []
    for strategy, replicas in _choices(ranks):
        plan = plan_count(
            num_params, strategy=strategy, world=ranks // replicas, replicas=replicas,
            num_units=num_units, dtype=dtypes[0], compute=dtypes[1],
        )  # fmt: skip
        step = walk(plan, plain_trace(plan.units), Way(runs_ahead=True, on_accelerator=True))
        row = _row(plan, step, ranks, room, strategy=strategy)
        flops = [2.0 * unit.numel * tokens for unit in plan.units]
        found = clock.of_flops(plan, flops, own.get("compute", "bfloat16"))
        rows.append(_timed(row, found))
    each = text_of_bytes(num_params / num_units * dtypes[1].itemsize)
    notes = [f"{counted(num_units, 'equal unit')} of {each}; activations come on top"]
    if clock.speed is not None:
        notes.append(f"steps of {tokens:,} tokens a device, without attention")
    notes += clock.notes(has_times=clock.speed is not None)
    return rows, notes, ""


def _choices(ranks: int) -> Iterator[tuple[str, int]]:
    """Strategy, replicas."""
    for strategy in STRATEGIES:
        yield strategy, 1
    if ranks > GROUP and ranks % GROUP == 0:
        yield "hybrid_shard", ranks // GROUP


def _row(
    plan: PlannedModel,
    step: Walk,
    ranks: int,
    room: int,
    *,
    is_known: bool = False,
    host_bytes: int = 0,
    **choice: str,
) -> Row:
    most, peak = step.most, step.peak
    usual = {"recompute": "none", "offload": "none", "wire": "exact", "unit": ""}
    chosen: dict[str, Any] = {**usual, **choice}
    return Row(
        **chosen,
        ranks=ranks,
        parameter_bytes=most["parameters"],
        gradient_bytes=most["gradients"],
        optimizer_bytes=most["optimizer"],
        gathered_bytes=most["gathered"],
        buffer_bytes=most["buffers"],
        activation_bytes=most["activations"] if is_known else None,
        logits_bytes=most["logits"] if is_known else None,
        host_bytes=host_bytes,
        peak_bytes=peak.total,
        peak_moment=peak.moment,
        peak_unit=peak.unit,
        at_peak=peak.parts,
        comm_bytes=plan.received_bytes,
        between_bytes=round(sum(_between(unit) for unit in plan.units)),
        room=room,
    )


def _between(unit: PlannedUnit) -> float:
    """Bytes that a rank receives from ranks of other hosts, which have GROUP each."""
    bucket, total = unit.layout.buckets[0], 0.0
    ranks = {"replicate": bucket.replicas, "shard": bucket.world}
    for each in unit.collectives:
        num = each.ranks or ranks[each.axis]
        received = each.received_bytes(num)
        if each.is_inside or (each.axis == "shard" and num <= GROUP):
            continue
        is_over_all = num > GROUP and bucket.world * bucket.replicas == num
        total += received * (num - GROUP) / (num - 1) if is_over_all else received
    return total if bucket.world * bucket.replicas > GROUP else 0.0


# -- from a job ----------------------------------------------------------------------------------
def _of_config(
    own: dict[str, str], rest: list[str], devices: _Devices, clock: Clock
) -> tuple[list[Row], list[str], str]:
    for key in ("units", "tokens", "dtype", "compute"):
        if key in own:
            raise ConfigError(f"--{key}: goes with --params alone")
    if "groupings" in own:
        return _of_groupings(own, rest, devices, clock)
    ranks, room = devices.ranks, devices.room
    loaded = _load(rest).on(ranks)
    for key, text in world_problems(loaded.config, ranks):
        raise loaded.error(key, text)
    given = loaded.config.shard.unit
    unit = ",".join(given) if isinstance(given, tuple) else str(given)
    from shardwise.train.hf.needs import smallest_change
    from shardwise.train.model import build_model, plan_of
    from shardwise.train.planned import Traces, step_of
    from shardwise.train.tensor_axis import part_of_rank, tensor_lines

    built = build_model(loaded.config, loaded.path.parent if loaded.path else None)
    model = part_of_rank(built, loaded.config)
    traces, is_gpu = Traces(model), devices.are_accelerators
    rows, is_known = [], True
    plans: dict[tuple[str, ...], PlannedModel] = {}
    for choice, config in _ways(loaded.config, ranks, is_gpu=is_gpu):
        key = choice["strategy"], choice["offload"], choice["wire"]  # recomputing lays out nothing
        if key not in plans:
            plans[key] = plan_of(model, config, ranks, on_accelerator=is_gpu)
        plan = plans[key]
        step = step_of(plan, config, ranks, traces, on_accelerator=is_gpu)
        is_known = step.is_known
        row = _row(plan, step.walk, ranks, room, is_known=is_known, host_bytes=step.host_bytes,
                   unit=unit, **choice)  # fmt: skip
        if row.offload == "none" and row.wire == "exact":  # others have no time
            row = _timed(row, clock.of_job(model, traces, plan, config, ranks))
        rows.append(row)
    notes = [*loaded.notes, *tensor_lines(built, loaded.config)]
    notes += clock.notes(has_times=any(row.step_s is not None for row in rows))
    if not is_known:
        notes.append("activations come on top: this model's forward tells nothing without values")
    change = ""
    if not any(row.fits for row in rows):
        config = _choosing(loaded.config, "full_shard", 1, "full")
        change = smallest_change(model, config, ranks, traces, room, on_accelerator=is_gpu)
    return rows, notes, change


def _of_groupings(
    own: dict[str, str], rest: list[str], devices: _Devices, clock: Clock
) -> tuple[list[Row], list[str], str]:
    """The rows of each value of `shard.unit`."""
    texts = [text.strip() for text in own["groupings"].split(",")]
    if "" in texts or any(word.partition("=")[0] == "--shard.unit" for word in rest):
        raise ConfigError("--groupings: names values of shard.unit, with commas, in its place")
    others = {key: value for key, value in own.items() if key != "groupings"}
    rows, notes, change = [], [], ""
    for text in dict.fromkeys(texts):
        found, notes, change = _of_config(others, [*rest, "--shard.unit", text], devices, clock)
        rows += [replace(row, unit=text, is_compared=True) for row in found]
    return rows, notes, change


def _ways(config: Config, ranks: int, *, is_gpu: bool) -> Iterator[tuple[dict[str, str], Config]]:
    """Each choice, and the job that takes it."""
    ways = [("none", "exact")]
    if is_gpu and num_states(config.optim.kind, own_keys(config.optim)):
        ways += [(place, "exact") for place in OFFLOAD[1:]]
    if ranks > GROUP:
        ways += [("none", wire) for wire in WIRES[1:]]
    for strategy, replicas in _choices(ranks):
        for recompute in RECOMPUTE:
            usual = _choosing(config, strategy, replicas, recompute)
            for offload, wire in ways:
                if wire != "exact" and strategy == "no_shard":
                    continue
                travels: Any = wire
                shard = replace(usual.shard, gather_wire=travels, reduce_wire=travels)
                places = replace(
                    usual.offload,
                    optimizer="cpu" if offload == "optimizer" else "none",
                    parameters="cpu" if offload == "parameters" else "none",
                )
                if wire == "exact":
                    shard = usual.shard
                if offload == "none":
                    places = usual.offload
                choice = {"strategy": strategy, "recompute": recompute, "offload": offload,
                          "wire": wire}  # fmt: skip
                yield choice, replace(usual, shard=shard, offload=places)


def _load(rest: list[str]) -> LoadedConfig:
    """A job's file, or a model of transformers in a job with defaults."""
    parsed = parse(rest, flags=["json", *_OWN])
    if parsed.nproc is not None:
        raise ConfigError("--nproc: say --gpus N")
    path = Path(parsed.config_file) if parsed.config_file else None
    if path is None or path.suffix == ".toml":
        return load_config(path, parsed.overrides)
    if not path.exists():
        raise ConfigError(f"{path}: neither a configuration (.toml) nor a model's directory")
    overrides = (("model.kind", "hf"), ("model.path", str(path)))
    return load_config(None, (*overrides, *parsed.overrides))


def _choosing(config: Config, strategy: Any, replicas: int, recompute: Any) -> Config:
    shard = replace(config.shard, strategy=strategy, activation_checkpointing=recompute)
    return replace(config, shard=shard, mesh=replace(config.mesh, replicate=replicas, shard=-1))


# -- time ----------------------------------------------------------------------------------------
def _timed(row: Row, found: StepTime | None) -> Row:
    if found is None:
        return row
    return replace(row, step_s=found.step_s, exposed_s=found.exposed_s)


# -- showing -------------------------------------------------------------------------------------
def _advice(rows: Sequence[Row], best: Row | None, change: str) -> str:
    if best is None:
        least = min(rows, key=lambda row: row.peak_bytes)
        lacks = text_of_bytes(least.peak_bytes - least.room)
        what = f"what would fit: {change}" if change else "take more devices, or adapters (LoRA)"
        return f"Nothing fits; {least} lacks {lacks}. {what[0].upper()}{what[1:]}."
    fitting = "what fits" if best.recompute == "none" else "what fits, all of it by recomputing,"
    if best.recompute == "none" and any(row.recompute != "none" for row in rows):
        fitting = "what fits without recomputation"
    if best.offload != "none" or best.wire != "exact":
        fitting = "what fits, in the cheapest way to make room,"
    left = "is left for activations" if best.activation_bytes is None else "is left"
    return (
        f"Take {best}: of {fitting} it receives least ({text_of_bytes(best.comm_bytes)} for a "
        f"micro-batch); {text_of_bytes(best.room - best.peak_bytes)} of each device {left}. "
        f"The peak is in the {_where(best)}."
    )


def _where(row: Row) -> str:
    return row.peak_moment + (f" of {row.peak_unit}" if row.peak_unit else "")


def _print(rows: Sequence[Row], room: int, notes: Sequence[str], advice: str) -> None:
    from shardwise.train.columns import Column, console_of, print_columns

    def sizes(name: str) -> list[str]:
        values = [getattr(row, name) for row in rows]
        return ["?" if value is None else text_of_bytes(value) for value in values]

    columns = [Column("strategy", [row.strategy for row in rows], is_number=False)]
    if len({row.recompute for row in rows}) > 1:
        columns.append(Column("recompute", [row.recompute for row in rows], is_number=False))
    columns += [
        Column(name, [getattr(row, name) for row in rows], is_number=False)
        for name in ("offload", "wire", "unit")
        if len({getattr(row, name) for row in rows}) > 1
    ]
    columns += [
        Column("parameters", sizes("parameter_bytes")),
        Column("gradients", sizes("gradient_bytes")),
        Column("optimizer", sizes("optimizer_bytes")),
        Column("gathered", sizes("gathered_bytes")),
        Column("buffers", sizes("buffer_bytes")),
        Column("activations", sizes("activation_bytes")),
        Column("logits", sizes("logits_bytes")),
        Column("peak", sizes("peak_bytes")),
        Column("in the", [_where(row) for row in rows], is_number=False),
        Column("received", sizes("comm_bytes")),
        *([Column("between hosts", sizes("between_bytes"))] if rows[0].ranks > GROUP else []),
        *_times(rows),
        Column("fits", ["yes" if row.fits else "no" for row in rows], is_number=False),
    ]
    console = console_of(sys.stdout)
    title = f"{counted(rows[0].ranks, 'device')} of {text_of_bytes(room)}, bytes of each"
    print_columns(console, title, columns)
    console.print(advice, markup=False)
    for note in notes:
        console.print(f"- {note}", markup=False)


def _times(rows: Sequence[Row]) -> list[Column]:
    from shardwise.train.columns import Column

    if all(row.step_s is None for row in rows):
        return []

    def texts(name: str) -> list[str]:
        values = [getattr(row, name) for row in rows]
        return [
            "?" if v is None else f"{v:.3g} s" if v >= 1 else f"{1e3 * v:.3g} ms" for v in values
        ]

    return [Column("step", texts("step_s")), Column("exposed", texts("exposed_s"))]
