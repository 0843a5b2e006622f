"""What lies at `model.path`, before a model is built: its configuration, its class, its weights.

    a directory              config.json, and model.safetensors, or several with their index
    a config.json alone      the model with new weights

Nothing is downloaded, and no code of the directory is run (`trust_remote_code` stays off). All that
cannot be trained is found here, and is one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.config import HFModelConfig
from shardwise.train.hf.library import library, quietly
from shardwise.train.text.keys import download_hint

_KEY = "model.path"
_MAX_CONFIG_BYTES = 16 * 2**20
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Of layers and experts: no model has a quarter, and each layer takes 1.5 ms to build.
_MOST = 4096
_COUNTS = re.compile(r"(num|n)_\w*(layer|expert|block)s?|(encoder|decoder)_layers|n?_?layers?")
_SHARES = re.compile(r"\w*(dropout|pdrop|layerdrop|drop_rate)\w*")


@dataclass(frozen=True, slots=True)
class Description:
    """A causal language model of transformers that can be built."""

    path: Path
    text: str  # of config.json
    config: Any  # transformers' own
    model_class: Any
    has_weights: bool

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def context(self) -> int | None:
        """The longest sequence that the model was made for, where its configuration says so."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


def describe(section: HFModelConfig) -> Description:
    """Reads the configuration; ConfigError for what is not there or cannot be trained."""
    path = Path(section.path).expanduser()
    has_weights = path.is_dir()
    file = path / "config.json" if has_weights else path
    text, said = _read(path, file)
    config = _as_config(file, said)
    model_class = _class_of(file, said, config)
    if has_weights and not any(True for w in _WEIGHTS for _ in path.glob(w)):
        raise _error(
            path, f"has no weights (*.safetensors); for new weights name {file.name} itself: {file}"
        )
    return Description(path, text, config, model_class, has_weights)


def _error(path: Path, text: str) -> ConfigError:
    return ConfigError(f"{_KEY}: {path}: {text}")


def _read(path: Path, file: Path) -> tuple[str, dict[str, Any]]:
    if not path.exists():
        raise _error(path, f"no such directory or configuration file{download_hint(path)}")
    if not file.exists():
        gguf = next(iter(sorted(path.glob("*.gguf"))), None)
        hint = f"; {gguf.name} has to be converted first (examples/smollm2)" if gguf else ""
        if (path / "adapter_config.json").exists():
            hint = "; it holds adapters: name the directory of the model they belong to"
        raise _error(path, f"has no config.json{hint}")
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise _error(file, "is no configuration: it is larger than 16 MiB")
        text = file.read_text(encoding="utf-8")
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(file, f"not valid JSON: {error}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise _error(file, f"cannot be read: {why}") from None
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise _error(file, "names no model_type; is it the configuration of a model?")
    return text, said


def _as_config(file: Path, said: dict[str, Any]) -> Any:
    kind, known = said["model_type"], library("transformers.models.auto.configuration_auto")
    if kind not in known.CONFIG_MAPPING:
        version = library().__version__
        if "auto_map" in said:
            raise _error(
                file,
                f"{kind!r} needs code of its own (auto_map), which is not run: trust_remote_code is"
                f" off, and transformers {version} does not know it by itself",
            )
        raise _error(file, f"transformers {version} knows no model_type {kind!r}")
    if quantized := said.get("quantization_config"):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else quantized
        raise _error(
            file,
            f"is quantized ({method}); write it as bfloat16 first: "
            "from_pretrained(...).dequantize(), then save_pretrained",
        )
    _check_counts(file, said)
    try:
        with quietly():
            return known.CONFIG_MAPPING[kind].from_dict(dict(said))
    except Exception as error:  # noqa: BLE001 - the library checks values in many ways
        raise _error(file, f"transformers does not take it: {one_line(error)}") from None


def _check_counts(file: Path, said: dict[str, Any]) -> None:
    """A slip in these would build for hours, in some classes before there is a model."""
    for key, value in _numbers(said, _COUNTS):
        if value > _MOST:
            raise _error(file, f"{key} is {value:,}; at most {_MOST:,} are built: is it a slip?")


def check_shares(described: Description) -> None:
    """Of what training drops: torch looks at them in the first step."""
    file = described.path / "config.json" if described.has_weights else described.path
    for key, value in _numbers(json.loads(described.text), _SHARES):
        if not 0 <= value <= 1:
            raise _error(file, f"{key} is {value}, which is no share: write one from 0 to 1")


def _numbers(said: dict[str, Any], keys: re.Pattern[str]) -> Iterator[tuple[str, int | float]]:
    """Of keys of that kind, in the configurations inside too."""
    for key, value in said.items():
        if isinstance(value, dict):
            yield from _numbers(value, keys)
        elif type(value) in (int, float) and keys.fullmatch(key):
            yield key, value


def _class_of(file: Path, said: dict[str, Any], config: Any) -> Any:
    """The class of the causal language model that the configuration is of."""
    auto = library("transformers.models.auto.modeling_auto")
    causal = {n for v in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for n in _names(v)}
    named = said.get("architectures") or []
    name = named[0] if isinstance(named, list) and named else None
    found = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None or (name is not None and name not in causal):
        what = name or f"model_type {said['model_type']!r}"
        raise _error(file, f"{what} is not a causal language model (one with ForCausalLM)")
    classes = found if isinstance(found, tuple | list) else [found]
    chosen = next((c for c in classes if c.__name__ == name), classes[0])
    is_encoder = said["model_type"] in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if is_encoder and getattr(config, "is_decoder", True) is False:
        raise _error(file, "is an encoder (is_decoder is false): no causal language model")
    return chosen


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def one_line(error: BaseException) -> str:
    """Its text, cut where it is long; its name where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__
