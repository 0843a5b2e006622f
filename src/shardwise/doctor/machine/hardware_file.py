"""The hardware file: `shardwise doctor --save FILE` measured it, `plan --hardware FILE` reads it.

TOML: [device] (kind, name, count, memory), [bandwidth] (copy, disk_write, bytes a second),
[compute] (ranks that ran side by side, threads of each, seconds of a call that moves nothing), one
[[operator]] for each kind, dtype and amount (operations of products and attention, bytes of
others), one [[collective]] for each kind, transport and size. `plan` reads [device], and where it
is of CPU ranks all but [bandwidth].
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from shardwise.doctor.machine.bandwidth import Measured
from shardwise.doctor.machine.gpus import Gpu
from shardwise.doctor.machine.host import Host
from shardwise.errors import ConfigError
from shardwise.plan.hardware import read_hardware
from shardwise.train.config_file import toml_value


def as_toml(host: Host, gpus: Sequence[Gpu], measured: Measured) -> str:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    room = min(host.memory_available, host.memory_limit or host.memory_available)
    device = {
        "kind": "cuda" if gpus else "cpu",
        "name": gpus[0].name if gpus else f"{host.cores} cores",
        "count": len(gpus) or 1,
        "memory": min(gpu.memory for gpu in gpus) if gpus else room,
    }
    said = "bandwidths: best of some repetitions; times: medians, the mean over ranks"
    lines = [f"# by shardwise doctor, {date}; {said}", "[device]"]
    lines += [f"{key} = {toml_value(value)}" for key, value in device.items()]
    lines += ["", "[bandwidth]  # bytes a second", f"copy = {measured.copy:.4g}"]
    lines.append(f"disk_write = {measured.disk_write:.4g}")
    compute = measured.compute
    lines += ["", "[compute]", f"ranks = {compute.ranks}", f"threads = {compute.threads}"]
    lines.append(f"call = {compute.call_s:.4g}")
    for one in compute.operators:
        lines += ["", "[[operator]]", f"kind = {toml_value(one.kind)}"]
        lines.append(f"dtype = {toml_value(one.dtype)}\namount = {one.amount:.6g}")
        lines.append(f"seconds = {one.seconds:.4g}")
    for each in measured.collectives:
        lines += ["", "[[collective]]"]
        lines.append(f"transport = {toml_value(each.transport)}\nkind = {toml_value(each.kind)}")
        lines.append(f"ranks = {each.ranks}\nbytes = {each.size_bytes}")
        lines.append(f"seconds = {each.seconds:.4g}")
    return "\n".join([*lines, ""])


def check_target(path: Path) -> None:
    """Before the seconds that measuring takes."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        what = "is a directory" if path.is_dir() else "lies in no directory that is there"
        raise ConfigError(f"--save: {path} {what}")
    if path.exists():
        try:
            read_hardware(path)
        except ValueError:
            raise ConfigError(
                f"--save: {path} is there and no hardware file; name another"
            ) from None


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--save: {path} cannot be written: {error.strerror}") from None
