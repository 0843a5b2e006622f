"""Finds out what lies at a path and opens it as a source; makes a checkpoint of one.

a checkpoint of ours, a directory of them (the newest), a run directory
a Hugging Face directory or a .safetensors file          safetensors_dir
torch.distributed.checkpoint                             import_dcp
DeepSpeed ZeRO-3                                         import_deepspeed
a torch.save file of a full state dict                   import_torch
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from shardwise.checkpoint import store
from shardwise.checkpoint.bounded import check_total
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.files import write_checked, write_pieces
from shardwise.checkpoint.import_dcp import METADATA, DcpSource
from shardwise.checkpoint.import_deepspeed import DeepSpeedSource, find_tag
from shardwise.checkpoint.import_torch import TensorSource, torch_source
from shardwise.checkpoint.index import INDEX, Chunk, Index
from shardwise.checkpoint.safetensors_dir import SafetensorsSource, begin_directory, pieces
from shardwise.checkpoint.safetensors_file import lay_out
from shardwise.checkpoint.said import Said
from shardwise.checkpoint.source import CheckpointSource, Source
from shardwise.checkpoint.writing import file_name
from shardwise.errors import CheckpointError, ShardwiseError


def open_source(path: Path | str) -> Source:
    """The source at a path; CheckpointError if nothing known is there, or what is there is damaged
    or means harm: it runs nothing, and asks for no more than it has."""
    path = Path(path).expanduser()
    try:
        source = _open(path)
        on_disk = sum(p.stat().st_size for p in _files(source.path))
        size_bytes = sum(info.size_bytes for info in source.tensors.values())
        check_total(len(source.tensors), size_bytes, on_disk, str(path))
        for name in [*source.tensors, *source.ties, *source.objects]:
            Said(name, str(path)).text()
    except ShardwiseError:
        raise
    except Exception as error:  # noqa: BLE001 - what others wrote can be wrong in any way
        text = f"{error}".splitlines()[0][:200] if f"{error}" else ""
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__} {text}") from None
    return source


def _files(path: Path) -> list[Path]:
    return [p for p in path.iterdir() if p.is_file()] if path.is_dir() else [path]


def _open(path: Path) -> Source:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if not path.is_dir():
        if path.suffix == ".safetensors":
            return SafetensorsSource(path)
        return torch_source(path)
    if (path / METADATA).exists():  # also of our format 1
        return DcpSource(path)
    if (path / store.MANIFEST).exists():
        return CheckpointSource(store.read_checkpoint(path))
    if any(path.glob("*.safetensors")):
        return SafetensorsSource(path)
    if (tag := find_tag(path)) is not None:
        return DeepSpeedSource(tag)
    if (newest := newest_in(path)) is not None:
        return CheckpointSource(newest)
    binaries = sorted(path.glob("pytorch_model*.bin"))
    if binaries:
        return _joined(path, [torch_source(p) for p in binaries])
    raise CheckpointError(
        f"{path}: holds no checkpoint that is known here (looked for {store.MANIFEST}, {METADATA}, "
        "*.safetensors, DeepSpeed's latest, step_*, pytorch_model*.bin)"
    )


def newest_in(path: Path) -> store.Checkpoint | None:
    """The newest complete checkpoint of a checkpoints or run directory."""
    for directory in (path, path / "checkpoints"):
        listing = store.list_checkpoints(directory)
        if listing.complete:
            return listing.complete[0]
        if listing.skipped:
            raise CheckpointError("; ".join(text for _, text in listing.skipped))
    return None


def _joined(path: Path, sources: list[TensorSource]) -> TensorSource:
    tensors: dict[str, Tensor] = {}
    for source in sources:
        for key in [*source.held, *source.ties]:
            if key in tensors:
                raise CheckpointError(f"{path}: {key} stands in two files")
            tensors[key] = source.held[source.ties.get(key, key)]
    return TensorSource(path, tensors, {})


def import_checkpoint(source: Source, final: Path) -> Path:
    """Makes a checkpoint of ours from a source, in pieces, by this process alone."""
    entries = [(key, info.dtype, info.shape) for key, info in sorted(source.tensors.items())]
    layout, name = lay_out(entries, {"format": "pt"}), file_name(0)
    chunks: dict[str, tuple[Chunk, ...]] = {
        s.name: (Chunk(name, s.offset, Box.whole(s.shape)),) for s in layout.tensors
    }
    index = Index(dict(source.tensors), chunks, dict(source.ties), dict(source.objects))
    text = index.to_bytes()  # what cannot be said shows before anything is written
    saving = begin_directory(final)
    try:
        content = layout.content(lambda key: pieces(source, key))
        entry = write_pieces(saving / name, layout.size_bytes, content)
        files = {name: entry, INDEX: write_checked(saving / INDEX, text)}
        of_ours = source.checkpoint if isinstance(source, CheckpointSource) else None
        step, world = (of_ours.step, of_ours.world_size) if of_ours is not None else (0, 1)
        return store.commit(saving, step, world, files)
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be written: {error}") from None
    finally:
        store.discard(saving)
