"""A model of `transformers` on the meta device, ready to be sharded and filled.

What no file holds (tables of rotary frequencies, scales of embeddings) is computed here, on the
CPU: these buffers are small, and parameters are still on meta, so that the model's own
`_init_weights` costs nothing. Parameters keep their names and their ties.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.hf.description import Description
from shardwise.train.hf.library import library, quietly


def build_on_meta(described: Description, dtype: torch.dtype, attention: str) -> Any:
    """The model with its parameters on meta in `dtype`, its tables computed, `use_cache` off."""
    config = described.config.__class__.from_dict(described.config.to_dict())
    config._name_or_path = str(described.path.absolute())  # where its tokenizer is
    try:
        with quietly(), torch.device("meta"):
            model = described.model_class._from_config(
                config, dtype=dtype, attn_implementation=attention
            )
            model.tie_weights()
            if (described.path / "generation_config.json").is_file():
                of_directory = library().GenerationConfig.from_pretrained(described.path)
                model.generation_config = of_directory
        compute_tables(model)
    except ConfigError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, KeyError):  # whose text is the key alone
            text = f"it knows no {text}"
        raise ConfigError(f"model.path: {described.path}: cannot be built: {text}") from error
    # What a checkpoint and an export keep is the configuration without the job's own settings.
    model.saved_config = config.to_json_string()
    for held in (config, config.get_text_config()):
        held.use_cache = False  # with a cache, packed documents would see each other
    return model


@torch.no_grad()
def compute_tables(model: Any) -> None:
    """Gives memory to buffers that no state dict has, and has `_init_weights` compute them."""
    waiting = {n: held for n, m in model.named_modules() if (held := _tables(m))}
    before: dict[str, tuple[Tensor, int]] = {}
    for name, held in waiting.items():
        module = model.get_submodule(name)
        for key, buffer in held.items():
            made = torch.empty_like(buffer, device="cpu")
            module._buffers[key] = made
            before[f"{name}.{key}".removeprefix(".")] = made, made._version
    for name in waiting:
        model._init_weights(model.get_submodule(name))

    def unwritten() -> list[str]:
        return [
            n for n, (b, version) in before.items()
            if model.get_buffer(n) is b and b._version == version
        ]  # fmt: skip

    for around in dict.fromkeys(n.rpartition(".")[0].rpartition(".")[0] for n in unwritten()):
        # Some fill a child's table at its parent.
        model._init_weights(model.get_submodule(around))
    if left := unwritten():
        raise ConfigError(
            f"model.path: {type(model).__name__} has buffers that no file holds and that its "
            f"_init_weights does not compute: {', '.join(left[:8])}"
        )


def _tables(module: nn.Module) -> dict[str, Tensor]:
    unsaved = module._non_persistent_buffers_set
    return {
        key: buffer
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and key in unsaved
    }
