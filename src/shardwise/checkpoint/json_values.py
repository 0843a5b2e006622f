"""State that is no tensor, as JSON and back, exactly: nothing in a checkpoint is ever unpickled.

    None, bool, int, str, list, dict with string keys    as they are (subclasses as their base)
    float                                                as it is; else {"$float": "inf"}
    tuple                                                {"$tuple": [...]}
    dict with other keys                                 {"$dict": [[key, value], ...]}
    collections.Counter (MultiStepLR has one)            {"$counter": [[key, value], ...]}
    a plain tensor of at most 64 elements                {"$tensor": [dtype, shape, [numbers]]}

Everything else is refused with the place where it was found.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from shardwise.checkpoint.bounded import shape_of
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.guarded import is_small
from shardwise.errors import CheckpointError

_MAX_TENSOR_NUMEL = 64
_TAGS = {"$float": str, "$tuple": list, "$dict": list, "$counter": list, "$tensor": list}


def to_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):  # and its subclasses, such as torch.__version__
        return str.__str__(value)
    if isinstance(value, int) and is_small(value):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if type(value) is tuple:
        return {"$tuple": [to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if type(value) is list:
        return [to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        return _dict_to_json(value, where)
    if type(value) is torch.Tensor and value.numel() <= _MAX_TENSOR_NUMEL:
        numbers = [to_json(n, where) for n in value.detach().cpu().flatten().tolist()]
        return {"$tensor": [dtype_name(value.dtype, where), list(value.shape), numbers]}
    raise CheckpointError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; what is "
        "saved beside tensors is numbers, strings, lists, tuples, dicts and None"
    )


def _dict_to_json(value: dict[Any, Any], where: str) -> Any:
    pairs = [[to_json(k, where), to_json(v, f"{where}.{k}")] for k, v in value.items()]
    if isinstance(value, Counter):
        return {"$counter": pairs}
    if all(type(k) is str and not k.startswith("$") for k in value):
        return dict(zip(value, (v for _, v in pairs), strict=True))
    return {"$dict": pairs}


def from_json(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [from_json(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {k: from_json(v, where) for k, v in value.items()}
    if len(value) > 1 or tag not in _TAGS or not isinstance(value[tag], _TAGS[tag]):
        raise CheckpointError(f"{where}: cannot be read: {tag}: unknown tag, or not as it is")
    try:
        return _from_tag(tag, value[tag], where)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        text = str(error).partition("\n")[0]
        raise CheckpointError(f"{where}: cannot be read: {tag}: {text}") from None


def _from_tag(tag: str, content: Any, where: str) -> Any:
    """What a tag stands for; which keys hash and which numbers a tensor takes, Python and torch
    know."""
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(from_json(v, where) for v in content)
    if tag == "$tensor":
        dtype, shape, numbers = content
        plain = [from_json(n, where) for n in numbers[: _MAX_TENSOR_NUMEL + 1]]
        return torch.tensor(plain, dtype=dtype_of(dtype, where)).reshape(shape_of(shape, where))
    pairs = {from_json(k, where): from_json(v, where) for k, v in content}
    return Counter(pairs) if tag == "$counter" else pairs
