"""Sizes and names as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SIZES = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9,
}  # fmt: skip

STRATEGY_ALIASES = {
    "ddp": "no_shard",
    "zero1": "shard_optimizer",
    "zero2": "shard_grad_op",
    "zero3": "full_shard",
    "fsdp": "full_shard",
    "hsdp": "hybrid_shard",
    "hfsdp": "hybrid_full_optimizer",
}
_ALIASES = STRATEGY_ALIASES | {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def short_names(names: Iterable[str]) -> list[str]:
    """What one may write for some of these."""
    known = set(names)
    return [short for short, full in _ALIASES.items() if full in known]


def full_name(text: str) -> str:
    """What a name of a strategy or dtype stands for: `ZeRO-3`, `full-shard`, `bf16`."""
    plain = text.strip().lower().replace("-", "_")
    return _ALIASES.get(plain.replace("_", ""), plain)


def parse_size(text: str) -> int | None:
    """Bytes of "32MiB", "1.5 GB", "4096"; None when it is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SIZES:
        return None
    return int(float(match[1]) * _SIZES[match[2].lower()])


def counted(number: int, noun: str) -> str:
    """ "1 rank", "2,000 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of_bytes(size_bytes: float) -> str:
    """ "1.5 MiB"."""
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {name}"
    return f"{size_bytes:.0f} B"
