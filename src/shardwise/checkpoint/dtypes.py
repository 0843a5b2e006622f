"""Names of dtypes in files: those of safetensors."""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, where: str) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        raise CheckpointError(
            f"{where}: tensors of {dtype} cannot be saved; there are {', '.join(map(str, _NAMES))}"
        )
    return name


def dtype_of(name: object, where: str) -> torch.dtype:
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return dtype
