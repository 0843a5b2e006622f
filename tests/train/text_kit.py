"""A tokenizer of bytes with a chat template, chats, and a way to open them; all in a temporary
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.train.config_file import LoadedConfig, load_config

# Like ChatML: `<u>Hi<e>\n<a>Hello<e>\n`, with <s> for the system.
CHATML = (
    "{% for m in messages %}{{ {'user': '<u>', 'assistant': '<a>', 'system': '<s>', 'tool': '<t>'}"
    "[m['role']] + m['content'] + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{% generation %}{{ m['content'] }}"
    "<e>{% endgeneration %}{{ '\n' }}{% else %}<u>{{ m['content'] }}<e>{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SPECIAL = ["<pad>", "<e>", "<u>", "<a>", "<s>", "<t>"]


def make_tokenizer(folder: Path, template: str | None = CHATML, **options: Any) -> Path:
    """One token a byte, behind the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: len(SPECIAL) + at for at, letter in enumerate(letters)}
    model = Tokenizer(
        models.BPE(vocab=vocabulary | {s: i for i, s in enumerate(SPECIAL)}, merges=[])
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        **{"pad_token": "<pad>", "eos_token": "<e>", "additional_special_tokens": SPECIAL[2:]}
        | options,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return folder


def chat(*texts: str, system: str = "") -> dict[str, Any]:
    """User and assistant in turn."""
    roles = ["user", "assistant"] * len(texts)
    found = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + found}


def chats(count: int) -> list[dict[str, Any]]:
    """All different, of several lengths."""
    return [chat(f"what is {i}?", f"it is {i} " + "and so on " * (i % 5)) for i in range(count)]


def write_lines(path: Path, records: list[Any]) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(tmp_path: Path, source: Path | str, **keys: Any) -> LoadedConfig:
    """A configuration over these files; keys like `data__seq_len=64`. The tokenizer is made where
    none is named."""
    values: dict[str, Any] = {
        "run.dir": tmp_path / "run",
        "run.device": "cpu",
        "model.kind": "models:tiny",
        "data.format": "chat",
        "data.source": source,
        "data.seq_len": 64,
        "train.global_batch": 4,
        "train.micro_batch": 2,
    }
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    if "data.tokenizer" not in values:
        folder = tmp_path / "tokenizer"
        values["data.tokenizer"] = folder if folder.exists() else make_tokenizer(folder)
    texts = [(key, _text(value)) for key, value in values.items()]
    return load_config(None, texts)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)
