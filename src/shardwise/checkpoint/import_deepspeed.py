"""DeepSpeed ZeRO-3 checkpoints, read without DeepSpeed and without running code from them.

    latest                                               the tag, e.g. global_step100
    TAG/zero_pp_rank_{r}_mp_rank_00_model_states.pt      shapes of parameters, buffers, frozen parts
    TAG/[bf16_]zero_pp_rank_{r}_mp_rank_00_optim_states.pt   flat fp32 parts and moments of rank r

Each parameter is cut, flat, into equal parts for the ranks, the last one padded; a rank's flat
tensor holds its parts one after the other in the order of `param_shapes`. As read from files that
DeepSpeed 0.19 wrote; its own `zero_to_fp32.py` describes the same layout. Weights are taken in
fp32. Objects of DeepSpeed's classes become records (`guarded`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.bounded import read_metadata, shape_of, short
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.state import EXTRA, MODEL, OPTIM
from shardwise.checkpoint.torch_file import load_torch
from shardwise.errors import CheckpointError

_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RECORDS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
)


@dataclass(frozen=True, slots=True)
class _Flat:
    """Where a parameter's parts lie: the same offset in the flat tensor of each rank."""

    parts: tuple[Tensor, ...]
    offset: int
    length: int


def find_tag(path: Path) -> Path | None:
    """The folder with the files: `path`, or the one that `latest` names. None if there is none."""
    if _has_files(path):
        return path
    latest = path / "latest"
    if not latest.exists():
        return None
    tag = read_metadata(latest).decode(errors="replace").strip()
    if not re.fullmatch(r"\w[\w.-]*", tag) or not (path / tag).is_dir():
        raise CheckpointError(f"{latest}: names {short(tag)}, which is no folder beside it")
    return path / tag if _has_files(path / tag) else None


def _has_files(path: Path) -> bool:
    return path.is_dir() and any(_MODEL_FILE.fullmatch(p.name) for p in path.iterdir())


class DeepSpeedSource:
    """See the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: dict[str, str] = {}
        self.objects: dict[str, Any] = {EXTRA: {}}
        self.tensors: dict[str, TensorInfo] = {}
        self._flat: dict[str, _Flat] = {}
        self._whole: dict[str, Tensor] = {}
        try:
            self._read(_by_rank(path, _MODEL_FILE), _by_rank(path, _OPTIM_FILE))
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not as ZeRO-3 of DeepSpeed writes it: {error!r}"
            ) from None

    def _read(self, model_files: list[Path], optim_files: list[Path]) -> None:
        models = [load_torch(p, str(p), _RECORDS) for p in model_files]
        optims = [load_torch(p, str(p), _RECORDS)["optimizer_state_dict"] for p in optim_files]
        if len(optims) != len(models) or _partitions(optims[0]) != len(optims):
            raise CheckpointError(
                f"{self.path}: {_partitions(optims[0])} ranks wrote it, found the files of "
                f"{len(models)} (model states) and {len(optims)} (optimizer states)"
            )
        if (stage := _stage(optims[0])) != 3:
            raise CheckpointError(f"{self.path}: is of ZeRO stage {stage}; stage 3 can be read")
        first = models[0]
        for name, value in first["module"].items():
            if name in (first.get("buffer_names") or []):
                self._add_whole(MODEL + name, value)
        self._add_frozen(models)
        for group, shapes in enumerate(first["param_shapes"]):
            self._add_group(shapes, optims, group)
        for alias, name in (first.get("shared_params") or {}).items():
            if MODEL + name in self.tensors and MODEL + alias not in self.tensors:
                self.ties[MODEL + alias] = MODEL + name
        for key in ("global_steps", "global_samples", "ds_version"):
            if isinstance(first.get(key), int | str):
                self.objects[EXTRA][key] = first[key]

    def _add_group(self, shapes: Any, optims: list[Any], group: int) -> None:
        """The parameters of one optimizer group: weights and moments lie alike."""
        flats = {MODEL: [o["fp32_flat_groups"][group] for o in optims]}
        states = [o["optimizer_state_dict"]["state"].get(group, {}) for o in optims]
        scalars = {}
        for slot, value in states[0].items():
            is_flat = isinstance(value, Tensor) and value.shape == flats[MODEL][0].shape
            if is_flat:
                flats[slot] = [s[slot] for s in states]
            else:
                scalars[slot] = value
        offset, world = 0, len(optims)
        if any(p.dim() != 1 for parts in flats.values() for p in parts):
            raise CheckpointError(f"{self.path}: the tensors of group {group} are not flat")
        for name, shape in shapes.items():
            length = -(-math.prod(shape_of(shape, f"{self.path}: {name}")) // world)
            for slot, parts in flats.items():
                key = MODEL + name if slot == MODEL else f"{OPTIM}{name}.{slot}"
                if any(offset + length > p.numel() for p in parts):
                    raise CheckpointError(f"{self.path}: {name}: lies outside of the flat tensors")
                self._add(key, parts[0].dtype, shape)
                self._flat[key] = _Flat(tuple(parts), offset, length)
            for slot, value in scalars.items():
                key = f"{OPTIM}{name}.{slot}"
                if slot == "step" or isinstance(value, Tensor):
                    self._add_whole(key, torch.as_tensor(value, dtype=torch.float32))
                else:
                    self.objects[key] = value
            offset += length

    def _add_frozen(self, models: list[Any]) -> None:
        shapes = models[0].get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            parts = [m["frozen_param_fragments"][name].flatten() for m in models]
            length = min(part.numel() for part in parts)
            if math.prod(shape_of(shape, f"{self.path}: {name}")) > length * len(parts):
                raise CheckpointError(f"{self.path}: {name}: its {len(parts)} parts are too short")
            self._add(MODEL + name, parts[0].dtype, shape)
            self._flat[MODEL + name] = _Flat(tuple(parts), 0, length)

    def _add_whole(self, key: str, tensor: Tensor) -> None:
        self._add(key, tensor.dtype, tensor.shape)
        self._whole[key] = tensor

    def _add(self, key: str, dtype: torch.dtype, shape: Any) -> None:
        if key in self.tensors:
            raise CheckpointError(f"{self.path}: {key} stands there twice")
        self.tensors[key] = TensorInfo(dtype, shape_of(tuple(shape), f"{self.path}: {key}"))

    def read(self, key: str, box: Box, out: Tensor) -> None:
        shape = self.tensors[key].shape
        if key in self._whole:
            out.copy_(self._whole[key][box.slices_in(Box.whole(shape))])
            return
        if not box.numel:
            return
        first, count = (box.start[0], box.size[0]) if shape else (0, 1)
        row_numel = math.prod(shape[1:])
        rows = self._range(self._flat[key], first * row_numel, (first + count) * row_numel)
        if not shape:
            out.copy_(rows.reshape(()))
            return
        held = Box(first_start(first, shape), (count, *shape[1:]))
        out.copy_(rows.view(held.size)[box.slices_in(held)])

    @staticmethod
    def _range(flat: _Flat, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a parameter, from the ranks that have them."""
        found = []
        for rank in range(start // flat.length, -(-stop // flat.length)):
            a = max(start - rank * flat.length, 0)
            b = min(stop - rank * flat.length, flat.length)
            found.append(flat.parts[rank][flat.offset + a : flat.offset + b])
        return torch.cat(found)

    def close(self) -> None:
        self._flat, self._whole = {}, {}


def first_start(row: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (row, *([0] * (len(shape) - 1)))


def _by_rank(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for file in path.iterdir():
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        if int(match[2]) != 0:
            raise CheckpointError(
                f"{path}: was written with tensor parallelism (mp_rank {match[2]})"
            )
        found[int(match[1])] = file
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(f"{path}: has files of the ranks {sorted(found)} only")
    return [found[rank] for rank in sorted(found)]


def _partitions(optim: Any) -> int:
    count = optim["partition_count"]
    return max(count) if isinstance(count, list) else int(count)


def _stage(optim: Any) -> Any:
    stage = optim["zero_stage"]
    return stage.args[0] if hasattr(stage, "args") else int(stage)
