"""Which implementation of attention a model runs with: flash where it is installed, else sdpa, else
eager, as far as the model supports it and the job's device and dtype allow it.

Some models support less (Gemma 2 caps its scores, which sdpa cannot). The choice and what spoke
against an earlier one are told on the console.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.hf.library import library

_ORDER = ("flash_attention_2", "sdpa", "eager")


def choose_attention(
    model_class: Any, asked: str, device_type: str, compute_dtype: str
) -> tuple[str, str]:
    """The implementation, and why not an earlier one; ConfigError for one that was asked for and
    cannot be."""
    if asked != "auto":
        if why := _objection(asked, model_class, device_type, compute_dtype):
            raise ConfigError(f"model.attention: {asked}: {why}; use auto")
        return asked, "as asked for"
    passed: list[str] = []
    for name in _ORDER:
        if not (why := _objection(name, model_class, device_type, compute_dtype)):
            return name, "; ".join(passed)
        passed.append(f"not {name}: {why}")
    raise ConfigError(f"model.attention: {model_class.__name__} supports none of {_ORDER}")


def _objection(name: str, model_class: Any, device_type: str, compute_dtype: str) -> str:
    """What speaks against an implementation; empty if nothing does."""
    kind = model_class.__name__
    if name == "flash_attention_2":
        if not getattr(model_class, "_supports_flash_attn", False):
            return f"{kind} does not support it"
        if device_type != "cuda":
            return f"it does not run on {device_type}"
        if compute_dtype == "float32":
            return "it takes no float32; set shard.param_dtype = 'bfloat16'"
        if not library("transformers.utils").is_flash_attn_2_available():
            return "the package flash-attn is not installed"
    if name == "sdpa" and not getattr(model_class, "_supports_sdpa", False):
        return f"{kind} does not support it"
    return ""
