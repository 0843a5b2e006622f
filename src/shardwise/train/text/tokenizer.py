"""The model's own tokenizer and chat template, from a local directory: nothing is fetched, and no
code that lies there is run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.text.keys import download_hint, tokenizer_dir

# What tokenizers are made of; any of the first six makes one.
_MADE_OF = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer_config.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json",
)  # fmt: skip
_MARKS = "{% generation %}"
MISSING = 'needs transformers and datasets: pip install "shardwise[hf]"'


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Where the tokenizer of a job lies, and the name of what is there."""

    folder: Path
    key: str
    chat_template: str | None
    digest: str


def has_tokenizer(folder: Path) -> bool:
    """Whether what lies there makes one."""
    return any((folder / name).is_file() for name in _MADE_OF[:6])


def find_tokenizer(config: Config) -> TokenizerFiles:
    """Looks, without importing anything heavy: every rank does, and few have to tokenise."""
    key = "data.tokenizer" if config.data.tokenizer else "model.path"
    folder = tokenizer_dir(config)
    assert folder is not None, "problems() asks for one"
    if not folder.is_dir():
        raise ConfigError(f"{key}: {folder}: no such directory{download_hint(folder)}")
    there = [folder / name for name in _MADE_OF if (folder / name).is_file()]
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{key}: {folder} has no tokenizer ({', '.join(_MADE_OF[:3])}); copy that of the model "
            "there, or name another directory as data.tokenizer"
        )
    template = _template_file(config)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{_version('transformers')} {_version('tokenizers')} {template}".encode())
    for file in there:
        if file.name != "config.json":  # names the class of a tokenizer at most
            digest.update(file.name.encode() + _bytes(file, key))
    return TokenizerFiles(folder, key, template, digest.hexdigest())


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        raise ConfigError(f"data.format: {MISSING}") from None


def _bytes(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {file}: cannot be read: {error.strerror}") from None


def _template_file(config: Config) -> str | None:
    name = config.data.chat_template
    if not name:
        return None
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.chat_template: {name}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"data.chat_template: {name}: cannot be read as text") from None


def load_tokenizer(files: TokenizerFiles, needs_template: bool) -> Any:
    """The tokenizer of transformers, with the template that chats are to be rendered by."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"data.format: {MISSING}") from None
    where = f"{files.key}: {files.folder}"
    if _needs_code(files.folder):
        raise ConfigError(
            f"{where}: its tokenizer is Python code of its own (trust_remote_code), which is not "
            "run; name the directory of one that transformers knows as data.tokenizer"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(files.folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes it raise
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: the tokenizer cannot be read: {why}") from None
    if files.chat_template is not None:
        tokenizer.chat_template = files.chat_template
    if isinstance(tokenizer.chat_template, dict):
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if needs_template and not tokenizer.chat_template:
        raise ConfigError(
            f"{where}: the tokenizer has no chat template; give one as data.chat_template = FILE "
            f"(jinja; the assistant's part between {_MARKS} and {{% endgeneration %}})"
        )
    return tokenizer


def _needs_code(folder: Path) -> bool:
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        return "AutoTokenizer" in settings.get("auto_map", {})
    except (OSError, ValueError, AttributeError, TypeError):
        return False
