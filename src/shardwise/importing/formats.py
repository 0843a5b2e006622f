"""A file of others from its path to an `Imported`."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.importing import accelerate, deepspeed, trainer
from shardwise.importing.account import Account
from shardwise.importing.files import kind_of, read_document
from shardwise.importing.result import Imported, settle

_KEYS = {
    "deepspeed": deepspeed.KEYS,
    "accelerate": accelerate.KEYS,
    "trainer": trainer.KEYS - {"fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"},
    "fsdp": trainer.FSDP_KEYS,
}
_NAMES = {
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
    "trainer": "arguments of the Trainer",
    "fsdp": "fsdp_config of the Trainer",
}


def import_file(path: Path, ranks: int | None = None, kind: str | None = None) -> Imported:
    """Reads, translates and settles it; every mistake is a `ConfigError` of one line."""
    document = read_document(path)
    account = Account(ranks)
    part = account.add(document)
    try:
        kind = kind or kind_of(document, _KEYS)
        if kind == "deepspeed":
            deepspeed.translate_deepspeed(part)
        elif kind == "accelerate":
            accelerate.translate_accelerate(part, path.parent)
        elif kind == "trainer":
            trainer.translate_trainer(part, path.parent)
        else:
            trainer.translate_fsdp_config(part, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settle(account, _NAMES[kind], str(path))
