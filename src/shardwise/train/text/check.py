"""Do the model and the packed documents fit? Asked of the real model, before the first step.

    check_sizes     the embedding has a row for every token, the context a place for every document
    check_packing   a document's logits are the same when another one stands before it in its row

Models of transformers take the borders of documents from `position_ids`, and only where they get no
mask and no cache; some do not look at them, and some attention kernels do so in batches of one row
only. Nothing of that is an error there: the documents would see each other without a word. So the
beginnings of two documents are run alone, and packed in both orders. What a document behind the
border has in difference is compared with what the one before it has, which is rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.calling import arguments_of
from shardwise.train.config import Config
from shardwise.train.data import Data
from shardwise.train.order import Int64Array
from shardwise.train.text.samples import TextSamples, as_batch

_Document = tuple[Int64Array, Int64Array]

# The median over tokens of |difference| / |logits| that is rounding for sure. A document that sees
# the one before it has 0.1 and more; kernels for other shapes 1e-6 in float32, 0.01 in bfloat16.
_ROUNDING = {"float32": 1e-3, "bfloat16": 3e-2}
_LOOK_AT = 1000  # rows, for one with two documents
_LENGTH = 64  # tokens of a document that are looked at: all logits of them are in memory at once


def check_sizes(data: Data, model: nn.Module) -> None:
    """ConfigError for tokens without an embedding, and for documents longer than the context."""
    if not isinstance(data.train, TextSamples):
        return
    rows = _embedding_rows(model)
    if rows is not None and data.largest_token >= rows:
        raise ConfigError(
            f"data.tokenizer: it makes token {data.largest_token}, but the embedding of the model "
            f"has {rows} rows; use the tokenizer of this model"
        )
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(context, int) and data.longest > context:
        raise ConfigError(
            f"data.seq_len: the longest document has {data.longest} tokens, but the context of the "
            f"model is {context}; set data.seq_len = {context}"
        )


def _embedding_rows(model: nn.Module) -> int | None:
    try:
        return model.get_input_embeddings().weight.shape[0]  # pyrefly: ignore
    except (AttributeError, NotImplementedError):
        return None


def check_packing(
    config: Config, data: Data, model: nn.Module, ranks: Ranks, device: torch.device
) -> list[str]:
    """ConfigError where documents of one row see each other; else what to tell. Collective."""
    if not isinstance(data.train, TextSamples) or not config.data.packing:
        return []
    pair = _two_documents(data.train)
    if pair is None:
        return []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            error = _judge(model, pair, config, device)
    except ConfigError as found:
        error = found
    finally:
        model.train(was_training)
    if error is not None:
        raise ranks.agreed(error)
    note = "data.packing: logits of packed documents are those of single ones"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        note += (
            "; the load balancing loss of the experts (router_aux_loss) is over all tokens of a "
            "micro-batch, and differs"
        )
    return [note]


def _two_documents(samples: TextSamples) -> tuple[_Document, _Document] | None:
    """The beginnings of the first two of the first row that has two."""
    for index in range(min(len(samples), _LOOK_AT)):
        documents = samples.documents(index)
        if len(documents) > 1:
            a, b = ((tokens[:_LENGTH], labels[:_LENGTH]) for tokens, labels in documents[:2])
            return a, b
    return None


def _judge(
    model: nn.Module, pair: tuple[_Document, _Document], config: Config, device: torch.device
) -> ConfigError | None:
    a, b = pair
    alone = [_logits(model, [[document]], device)[0] for document in pair]
    rows = [[a, b], [b, a]] if config.train.micro_batch > 1 else [[a, b]]
    rounding = _ROUNDING[config.shard.param_dtype]
    if not all(bool(torch.isfinite(logits).all()) for logits in alone):
        return ConfigError(
            "model.path: the logits of the first documents are nan or inf before any step; look at "
            "the weights that are read"
        )
    found = _difference(_logits(model, rows, device), alone, rounding)
    if not found:
        return None
    remedy = "set data.packing = false"
    if len(rows) > 1 and not _difference(_logits(model, rows[:1], device), alone, rounding):
        remedy = "it does in batches of one row: set train.micro_batch = 1, or data.packing = false"
    name = type(model).__name__.removeprefix("FSDP")
    return ConfigError(
        f"data.packing: {name} does not keep the documents of a row apart: with another one before "
        f"it, the logits of a document differ by {found:.2%}; {remedy}"
    )


def _logits(model: nn.Module, rows: list[list[_Document]], device: torch.device) -> Tensor:
    length = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    batch = as_batch(rows, pad=0, seq_len=length)
    del batch["labels"]
    args, kwargs = arguments_of(model, {k: v.to(device) for k, v in batch.items()})
    logits = getattr(model(*args, **kwargs), "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            "data.packing: the model returns no .logits, so nothing shows whether it keeps "
            "documents apart; set data.packing = false"
        )
    return logits.float()


def _difference(packed: Tensor, alone: list[Tensor], rounding: float) -> float:
    """0 where documents behind another one differ no more than those before it; else how much."""
    before, behind = [], []
    for row, (first, second) in zip(packed, (alone, alone[::-1]), strict=False):
        before.append(_relative(row[: len(first)], first))
        behind.append(_relative(row[len(first) : len(first) + len(second)], second))
    noise, found = (float(torch.cat(parts).median()) for parts in (before, behind))
    if noise > 3 * rounding:
        return noise
    return found if not found <= max(rounding, 3 * noise) else 0.0


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
