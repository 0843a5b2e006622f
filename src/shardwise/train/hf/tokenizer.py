"""The tokenizer that goes along with a trained model: the one that made its data.

    where it lies     `data.tokenizer`, else beside the model
    chat template     `data.chat_template`, where the data are chats and it is given
    pad token         made where there is none, so that `transformers` can pad batches of prompts

Checkpoints name its directory and keep the texts that differ from what lies there; exports write
both beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint.beside import tokenizer_in
from shardwise.errors import ConfigError
from shardwise.train.config import Config, HFModelConfig
from shardwise.train.text.keys import tokenizer_dir
from shardwise.train.text.tokenizer import TokenizerFiles, find_tokenizer, load_tokenizer

SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# What such a token is called by those who have one.
_PADS = (
    "<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>", "<pad_token>", "<PAD>",
)  # fmt: skip


def beside_weights(model: Any, config: Config) -> tuple[dict[str, str], str]:
    """What checkpoints keep of the tokenizer, and what to say of it; nothing where there is
    none."""
    assert isinstance(config.model, HFModelConfig)
    folder = tokenizer_dir(config)
    if folder is None or not tokenizer_in(folder):
        return {}, ""
    kept = {"tokenizer_from": str(folder.absolute())}
    settings, said = _settings(folder), ""
    if config.data.chat_template and config.data.format in ("chat", "instruction"):
        template = find_tokenizer(config).chat_template
        assert template is not None
        kept[TEMPLATE] = template
        if settings.pop("chat_template", None) is not None:
            kept[SETTINGS] = json.dumps(settings, indent=2)
    if (found := _made_pad(folder, settings, model)) is not None:
        pad, number = found
        # A model that continues texts needs them at the right, next to what it adds.
        kept[SETTINGS] = json.dumps(
            {"padding_side": "left", **settings, "pad_token": pad}, indent=2
        )
        kept["pad_token_id"] = str(number)
        said = (
            f"tokenizer: it has no pad token; in what is exported {pad!r} is one, and batches are "
            f"padded on the {json.loads(kept[SETTINGS])['padding_side']}"
        )
    return kept, said


def take_along(model: Any, kept: dict[str, str]) -> None:
    """Lets checkpoints of the model keep that."""
    kept = dict(kept)
    number = kept.pop("pad_token_id", None)
    if number is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = int(number)
    model.saved_beside = {**getattr(model, "saved_beside", {}), **kept}


def _settings(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _made_pad(folder: Path, settings: dict[str, Any], model: Any) -> tuple[str, int] | None:
    """A token to pad with, and its number; None where the tokenizer has one, or is damaged."""
    if settings.get("pad_token"):
        return None
    try:
        tokenizer = load_tokenizer(TokenizerFiles(folder, "", None, ""), needs_template=False)
    except ConfigError:  # of a job on tokens, which does not need it
        return None
    if tokenizer.pad_token_id is not None:
        return None
    rows, known = model.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    wanted = [t for t in _PADS if t in known]
    wanted += [t for t in (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token) if t]
    wanted += sorted(known, key=known.__getitem__)[:1]
    return next(((t, known[t]) for t in wanted if known.get(t, rows) < rows), None)
