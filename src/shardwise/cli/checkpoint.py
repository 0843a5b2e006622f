"""`shardwise checkpoint`: look at, verify, compare and convert checkpoints, in one CPU process.

Exit codes: 0 done (verify: whole; diff: equal), 1 damaged or different, 2 a mistake (one line on
stderr). With --json one object on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.options import CommandParser, unknown_command
from shardwise.units import counted, full_name, parse_size

if TYPE_CHECKING:
    from shardwise.checkpoint.source import Source
    from shardwise.checkpoint.store import Checkpoint

_EPILOG = """PATH is a checkpoint, a directory of them or a run directory (the newest counts), a
Hugging Face directory, a .safetensors file, a torch.distributed.checkpoint directory, a DeepSpeed
ZeRO-3 directory or a torch.save file of a full state dict. No code from any of them is run."""


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shardwise checkpoint",
        description="Look at, verify, compare and convert checkpoints, in one CPU process.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, **paths: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, epilog=_EPILOG)
        for dest, metavar in paths.items():
            several = "+" if metavar.endswith("...") else None
            command.add_argument(dest, type=Path, metavar=metavar.rstrip(" ."), nargs=several)
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
        return command

    add("ls", "what is there: checkpoints of a directory, or the tensors of one", path="PATH")
    add("verify", "read everything and compare with the checksums", path="PATH ...")
    diff = add("diff", "names, shapes, dtypes and values of two", left="PATH", right="OTHER_PATH")
    diff.add_argument("--weights", action="store_true", help="only the weights of the model")
    text = "weights as a Hugging Face directory of safetensors; adapters as one of peft"
    _export_options(export := add("export", text, source="PATH", target="DIR"))
    export.add_argument("--tokenizer", type=Path, help="its directory; else where it was")
    text = "the model that adapters were trained beside, with these added to it"
    merge = add("merge", text, source="PATH", target="DIR")
    merge.add_argument("--base", type=Path, help="directory of that model; else where it was")
    _export_options(merge)
    add("import", "make a checkpoint from what another program wrote", source="PATH", target="DIR")
    convert = add("convert", "from any format to another", source="PATH", target="TARGET")
    convert.add_argument("--to", choices=("shardwise", "safetensors", "torch"), required=True)
    _export_options(convert)
    return parser


def _export_options(parser: argparse.ArgumentParser) -> None:
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", type=full_name, choices=dtypes, help="of weights; or bf16, ...")
    parser.add_argument("--max-shard-size", type=_size, default=5 * 10**9, help="e.g. 5GB, 500MB")
    parser.add_argument("--strip-prefix", help="what names of weights lose, e.g. 'model.'")


def _size(text: str) -> int:
    size_bytes = parse_size(text)
    if not size_bytes:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB, found {text!r}")
    return size_bytes


def main(arguments: Sequence[str]) -> int:
    """Runs one sub-command; returns the exit code."""
    commands = {"ls": _ls, "verify": _verify, "diff": _diff}
    commands |= dict.fromkeys(("export", "import", "convert"), _convert) | {"merge": _merge}
    words = list(arguments) or ["--help"]
    try:
        if words[0] not in commands and not words[0].startswith("-"):
            raise ConfigError(unknown_command(words[0], commands))
        options = _parser().parse_args(words)
    except ConfigError as error:
        print(f"shardwise checkpoint: {error}", file=sys.stderr)
        return 2
    except SystemExit:  # after --help
        return 0

    try:
        return commands[options.command](options)
    except (CheckpointError, ConfigError, OSError, MemoryError, RecursionError) as error:
        _say(f"shardwise checkpoint: {str(error) or type(error).__name__}"[:2000], sys.stderr)
        return 2


def _say(text: str, stream: TextIO | None = None) -> None:
    """One line, whatever names from files hold."""
    print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), file=stream)


def _ls(options: argparse.Namespace) -> int:
    from shardwise.checkpoint import store

    for directory in (options.path / "checkpoints", options.path):
        listing = store.list_checkpoints(directory)
        if listing.complete or listing.skipped:
            return _ls_directory(options, listing)
    from shardwise.checkpoint.importing import open_source

    source = open_source(options.path)
    try:
        rows = [
            (key, str(info.dtype).removeprefix("torch."), list(info.shape), info.size_bytes)
            for key, info in sorted(source.tensors.items())
        ]
        total = sum(size for *_, size in rows)
        if options.json:
            keys = ("name", "dtype", "shape", "size_bytes")
            tensors = [dict(zip(keys, row, strict=True)) for row in rows]
            _print_json(
                {"path": str(source.path), "tensors": tensors, "ties": dict(source.ties)}
                | {"objects": sorted(source.objects), "size_bytes": total}
            )
            return 0
        width = max((len(row[0]) for row in rows), default=0)
        for name, dtype, shape, size in rows:
            _say(f"{name:{width}}  {dtype:9} {'x'.join(map(str, shape)) or '-':>16}  {size:>15,}")
        for alias, name in sorted(source.ties.items()):
            _say(f"{alias} = {name}")
        _say(f"{source.path}: {counted(len(rows), 'tensor')}, {total:,} bytes")
    finally:
        source.close()
    return 0


def _ls_directory(options: argparse.Namespace, listing: Any) -> int:
    rows = [_row(checkpoint) for checkpoint in listing.complete]
    if options.json:
        _print_json({"complete": rows, "incomplete": [text for _, text in listing.skipped]})
        return 0
    for row in rows:
        ranks = counted(row["ranks"], "rank")
        facts = [row["path"], f"step {row['step']}", ranks, f"{row['size_bytes']:,} bytes"]
        facts += [row["time"]] + ([] if row["loss"] is None else [f"loss {row['loss']:.4g}"])
        facts += [f"{row['model']} of {row['num_params']:,} parameters"] if row["model"] else []
        _say("  ".join(facts))
    for _, text in listing.skipped:
        _say(text)
    return 0


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    """What one checkpoint is; older ones, and those of others than `shardwise train`, say less."""
    from shardwise.checkpoint.source import CheckpointSource
    from shardwise.checkpoint.state import ABOUT, EXTRA
    from shardwise.checkpoint.store import MANIFEST

    objects: dict[str, Any] = {}
    with contextlib.suppress(CheckpointError):  # damaged: `verify` says where
        source = CheckpointSource(checkpoint)
        source.close()
        objects.update(source.objects)
    about, extra = objects.get(ABOUT, {}), objects.get(EXTRA, {})
    num, loss = about.get("num_params"), extra.get("loss")
    written = (checkpoint.path / MANIFEST).stat().st_mtime
    return {
        "path": str(checkpoint.path),
        "time": datetime.fromtimestamp(written).astimezone().isoformat(" ", "seconds"),
        "step": checkpoint.step,
        "loss": float(loss) if isinstance(loss, int | float) else None,
        "model": str(about["model"]) if "model" in about and isinstance(num, int) else None,
        "num_params": num if isinstance(num, int) else None,
        "ranks": checkpoint.world_size,
        "size_bytes": checkpoint.size_bytes,
    }


def _verify(options: argparse.Namespace) -> int:
    from shardwise.checkpoint import store
    from shardwise.checkpoint.source import CheckpointSource

    reports: dict[str, list[str]] = {}
    for path in options.path:
        if not path.exists():
            raise CheckpointError(f"{path}: no such file or directory")
        for found in _checkpoints_at(path):
            try:
                checkpoint = store.read_checkpoint(found)
                damaged = store.verify(checkpoint)
                if not damaged:
                    CheckpointSource(checkpoint).close()  # the index fits the files
            except CheckpointError as error:
                damaged = [str(error)]
            reports[str(found)] = damaged
    if options.json:
        _print_json({path: {"ok": not bad, "damage": bad} for path, bad in reports.items()})
    else:
        for path, bad in reports.items():
            for text in bad or [f"{path}: whole"]:
                _say(text)
    return 1 if any(reports.values()) else 0


def _checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint itself, or all steps below a checkpoints or run directory."""
    for directory in (path, path / "checkpoints"):
        if steps := sorted(directory.glob("step_*")):
            return steps
    return [path]


def _diff(options: argparse.Namespace) -> int:
    from shardwise.checkpoint.comparing import compare
    from shardwise.checkpoint.importing import open_source
    from shardwise.checkpoint.state import MODEL

    left, right = open_source(options.left), open_source(options.right)
    try:
        found = compare(left, right, MODEL if options.weights else "")
    finally:
        left.close()
        right.close()
    if options.json:
        _print_json(found.to_json())
        return 1 if found else 0
    sides = ("-", left.path, found.only_left), ("+", right.path, found.only_right)
    for sign, path, names in sides:
        for name in names:
            _say(f"{sign} {name}  (only in {path})")
    for name, what in found.changed:
        _say(f"~ {name}  {what}")
    num = len(found.changed)
    _say(
        f"{found.num_equal} equal, {num} changed, {len(found.only_left)} only left, "
        f"{len(found.only_right)} only right"
    )
    return 1 if found else 0


def _convert(options: argparse.Namespace) -> int:
    from shardwise.checkpoint.importing import open_source

    to = {"export": "safetensors", "import": "shardwise"}.get(options.command) or options.to
    source = open_source(options.source)
    try:
        count = _write(source, to, options)
    finally:
        source.close()
    return _tell_written(options, source.path, count)


def _merge(options: argparse.Namespace) -> int:
    from shardwise.train.hf.export import merge

    how = {"base": options.base, "dtype": _dtype_of(options)}
    count = merge(options.source, options.target, max_shard_bytes=options.max_shard_size, **how)
    return _tell_written(options, options.source, count)


def _tell_written(options: argparse.Namespace, path: Path, count: int) -> int:
    said = {"source": str(path), "target": str(options.target), "tensors": count}
    text = f"{options.target}: {counted(count, 'tensor')} from {path}"
    _print_json(said) if options.json else _say(text)
    return 0


def _dtype_of(options: argparse.Namespace) -> Any:
    import torch

    return getattr(torch, options.dtype) if options.dtype else None


def _write(source: Source, to: str, options: argparse.Namespace) -> int:
    from shardwise.checkpoint.exporting import export_torch
    from shardwise.checkpoint.importing import import_checkpoint
    from shardwise.train.hf.export import export

    if to == "shardwise":
        import_checkpoint(source, options.target)
        return len(source.tensors)
    how = {"dtype": _dtype_of(options), "strip_prefix": options.strip_prefix}
    if to == "torch":
        return export_torch(source, options.target, **how)
    how["tokenizer"] = getattr(options, "tokenizer", None)
    return export(source, options.target, max_shard_bytes=options.max_shard_size, **how)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))
