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

from shardwise.checkpoint.bounded import read_metadata, short
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.said import Said, records
from shardwise.checkpoint.state import EXTRA, MODEL, OPTIM
from shardwise.checkpoint.torch_file import load_torch
from shardwise.errors import CheckpointError

_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_RECORDS = {
    **records("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler"),
    **records("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    **records("deepspeed.utils.tensor_fragment", "fragment_address"),
    **records("argparse", "Namespace"),
}


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
        models, optims = (
            [Said(load_torch(p, str(p), _RECORDS), str(p)) for p in _by_rank(path, pattern)]
            for pattern in (_MODEL_FILE, _OPTIM_FILE)
        )
        self._read(models, [o.at("optimizer_state_dict") for o in optims])

    def _read(self, models: list[Said], optims: list[Said]) -> None:
        for ranks in map(_partitions, optims):
            if len(optims) != len(models) or ranks != len(optims):
                raise CheckpointError(
                    f"{self.path}: {ranks} ranks wrote it, found the files of "
                    f"{len(models)} (model states) and {len(optims)} (optimizer states)"
                )
        if (stage := _stage(optims[0])) != 3:
            raise CheckpointError(f"{self.path}: is of ZeRO stage {stage}; stage 3 can be read")
        first = models[0]
        buffers = {n.text() for n in first.get("buffer_names", ()).parts()}
        for name, value in first.at("module").entries().items():
            if name in buffers:
                self._add_whole(MODEL + name, value.of(Tensor))
        for name, shape in first.get("frozen_param_shapes", {}).entries().items():
            parts = [m.at("frozen_param_fragments").at(name).of(Tensor).flatten() for m in models]
            self._add_flat(MODEL + name, shape.shape(), parts, 0)
        groups = first.at("param_shapes").parts()
        flats = [o.at("fp32_flat_groups").parts() for o in optims]
        if any(len(f) != len(groups) for f in flats):
            raise CheckpointError(f"{self.path}: its ranks have not the same groups of parameters")
        for group, shapes in enumerate(groups):
            states = [o.at("optimizer_state_dict").at("state") for o in optims]
            self._add_group(shapes.entries(), [f[group].of(Tensor) for f in flats], states, group)
        for alias, name in first.get("shared_params", {}).entries().items():
            if MODEL + name.text() in self.tensors and MODEL + alias not in self.tensors:
                self.ties[MODEL + alias] = MODEL + name.text()
        for key in ("global_steps", "global_samples", "ds_version"):
            if isinstance(said := first.get(key).value, int | str):
                self.objects[EXTRA][key] = said

    def _add_group(
        self, shapes: dict[str, Said], flat: list[Tensor], states: list[Said], group: int
    ) -> None:
        """The parameters of one optimizer group: weights and moments lie alike."""
        flats, scalars = {MODEL: flat}, dict[str, Said]()
        for slot, said in states[0].get(group, {}).entries().items():
            if isinstance(said.value, Tensor) and said.value.shape == flat[0].shape:
                flats[slot] = [s.at(group).at(slot).of(Tensor) for s in states]
            else:
                scalars[slot] = said
        offset = 0
        for name, shape in ((n, said.shape()) for n, said in shapes.items()):
            for slot, parts in flats.items():
                key = MODEL + name if slot == MODEL else f"{OPTIM}{name}.{slot}"
                self._add_flat(key, shape, parts, offset)
            for slot, said in scalars.items():
                key = f"{OPTIM}{name}.{slot}"
                if slot == "step" or isinstance(said.value, Tensor):
                    self._add_whole(key, _number(said))
                else:
                    self.objects[key] = said.value
            offset += -(-math.prod(shape) // len(flat))

    def _add_flat(self, key: str, shape: tuple[int, ...], parts: list[Tensor], offset: int) -> None:
        """One that lies in the flat tensors of all ranks."""
        length = -(-math.prod(shape) // len(parts))
        if any(p.dim() != 1 or p.dtype != parts[0].dtype for p in parts):
            raise CheckpointError(f"{self.path}: {key}: its parts are not flat, or of two dtypes")
        if any(offset + length > p.numel() for p in parts):
            raise CheckpointError(f"{self.path}: {key}: lies outside of the flat tensors")
        self._add(key, parts[0].dtype, shape)
        self._flat[key] = _Flat(tuple(parts), offset, length)

    def _add_whole(self, key: str, tensor: Tensor) -> None:
        self._add(key, tensor.dtype, tensor.shape)
        self._whole[key] = tensor

    def _add(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if key in self.tensors:
            raise CheckpointError(f"{self.path}: {key} stands there twice")
        self.tensors[key] = TensorInfo(dtype, tuple(shape))

    def read(self, key: str, box: Box, out: Tensor) -> None:
        shape = self.tensors[key].shape
        if key in self._whole:
            out.copy_(self._whole[key][box.slices_in(Box.whole(shape))])
            return
        if not box.numel:
            return
        if not shape:
            out.copy_(self._range(self._flat[key], 0, 1).reshape(()))
            return
        held, row_numel = Box.whole(shape).rows(box.start[0], box.stop[0]), math.prod(shape[1:])
        rows = self._range(self._flat[key], box.start[0] * row_numel, box.stop[0] * row_numel)
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


def _by_rank(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for file in path.iterdir():
        if (match := pattern.fullmatch(file.name)) is None:
            continue
        if int(match[2]) != 0:
            raise CheckpointError(f"{file}: was written with tensor parallelism")
        found[int(match[1])] = file
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(f"{path}: has files of the ranks {sorted(found)} only")
    return [found[rank] for rank in sorted(found)]


def _partitions(optim: Said) -> int:
    said = optim.at("partition_count")
    counts = said.parts() if isinstance(said.value, list) else [said]
    return max((n.count() for n in counts), default=0)


def _stage(optim: Said) -> int:
    said = optim.at("zero_stage")
    value = (*said.value.args, None)[0] if said.kind == "ZeroStageEnum" else said.value
    return Said(value, said, "stage").count()


def _number(said: Said) -> Tensor:
    """A count of steps, or another number, as it is kept for each parameter."""
    if isinstance(said.value, Tensor) and not said.value.is_complex():
        return said.value.to(torch.float32)
    return torch.tensor(float(said.of(int) if isinstance(said.value, int) else said.of(float)))
