"""`shardwise data CONFIG`: what a model will see. Counts, lengths, padding, trained tokens, and the
first samples of the run with the trained tokens in colour (between « and » where there is none)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from shardwise.errors import ConfigError
from shardwise.train.columns import Column, console_of, print_columns
from shardwise.train.command import parse
from shardwise.train.config import Config
from shardwise.train.config_file import load_config
from shardwise.train.limits import explain
from shardwise.train.order import Int64Array
from shardwise.train.restarts import Restarts
from shardwise.train.text.keys import has_texts
from shardwise.units import counted

_HELP = """usage: shardwise data CONFIG.toml [--section.key VALUE ...]

Tokenises the data of a job as `shardwise train` would, and shows what the model will see: how many
documents, how long they are, how much is padding, which tokens are trained, and three samples with
these in colour. Trains nothing; writes only the cache that training uses too."""
_SAMPLES, _SHOWN_TOKENS = 3, 400
_BARS, _BAR_WIDTH = 10, 40


def main(arguments: Sequence[str]) -> int:
    """Runs `data` and returns its exit code."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    try:
        show(config_of(arguments), console_of(sys.stdout))
        return 0
    except ConfigError as error:
        print(f"shardwise data: {error}", file=sys.stderr)
    except OSError as error:  # of the cache: no space, no permission, a limit
        why = explain(error)
        print(f"shardwise data: {error}{f': {why}' if why else ''}", file=sys.stderr)
    return 2


def config_of(arguments: Sequence[str]) -> Config:
    """The configuration of the job, whose data are texts."""
    parsed = parse(arguments)
    if parsed.nproc is not None or parsed.port or parsed.restarts != Restarts():
        raise ConfigError("starts no ranks; leave out the launcher's options")
    loaded = load_config(parsed.config_file, parsed.overrides)
    if not has_texts(loaded.config.data):
        text = "shows data of the formats 'text', 'chat' and 'instruction'; this job's are 'tokens'"
        raise loaded.error("data.format", text)
    return loaded.config


def show(config: Config, console: Console) -> None:
    """Everything, one part below the other."""
    from shardwise.train.text.opening import document_lengths, figures_of, left_out
    from shardwise.train.text.samples import TextSamples
    from shardwise.train.text.store import open_store
    from shardwise.train.text.tokenizer import find_tokenizer, load_tokenizer

    store = open_store(config)
    figures, counts = figures_of(store, config), store.info["counts"]
    console.print(f"{store.info['files']}: {counted(counts['read'], 'record')}", markup=False)
    for text in left_out(counts, config):
        console.print(f"  {text}", markup=False)
    names = ("documents", "sequences", "tokens", "trained tokens")
    cells = [
        [f"{numbers[0]:,}", f"{numbers[1]:,}", f"{sum(numbers):,}"]
        for numbers in (figures.documents, figures.rows, figures.tokens, figures.trained)
    ]
    rows = [Column(name, values) for name, values in zip(names, cells, strict=True)]
    print_columns(console, "", [Column("", ["training", "held out", "all"], False), *rows])
    steps = figures.rows[0] / config.train.global_batch
    console.print(
        f"{figures.trained_share:.1%} of the tokens are trained; {figures.padding:.1%} of the "
        f"places in batches are padding; one epoch is {steps:,.1f} steps"
    )
    _histogram(document_lengths(store), console)
    tokenizer = load_tokenizer(find_tokenizer(config), needs_template=False)
    samples = TextSamples(store, "train", config.data.seq_len)
    _show_samples(samples, tokenizer, config, console)


def _histogram(lengths: Int64Array, console: Console) -> None:
    """Documents by their length in tokens, in equal steps up to the longest."""
    longest = int(lengths.max())
    step = max(1, -(-longest // _BARS))
    counts = np.bincount((lengths - 1) // step)
    console.print("\nlength in tokens, documents", markup=False)
    width = len(f"{longest:,}")
    for at, count in enumerate(counts.tolist()):
        bar = "█" * max(1 if count else 0, round(_BAR_WIDTH * count / max(counts)))
        span = f"{at * step + 1:>{width},} to {min(longest, (at + 1) * step):>{width},}"
        console.print(f"  {span}  {bar} {count:,}", markup=False, highlight=False)


def _show_samples(samples: Any, tokenizer: Any, config: Config, console: Console) -> None:
    from shardwise.train.order import SampleOrder

    number = min(_SAMPLES, len(samples))
    order = SampleOrder(len(samples), config.run.seed).indices(0, number)
    is_plain = console.color_system is None
    for at, index in enumerate(order.tolist(), start=1):
        documents = samples.documents(index)
        size = sum(len(tokens) for tokens, _ in documents)
        of = f"{counted(len(documents), 'document')}, {counted(size, 'token')}"
        console.print(f"\nsample {at} of the run: {of}", style="bold", markup=False)
        left = _SHOWN_TOKENS
        for tokens, labels in documents:
            if left > 0:
                console.print(_coloured(tokens[:left], labels[:left], tokenizer, is_plain))
            left -= len(tokens)
        if left < 0:
            console.print(f"... and {counted(-left, 'token')} more", style="dim")


def _coloured(tokens: Int64Array, labels: Int64Array, tokenizer: Any, is_plain: bool) -> Text:
    """A document as the model sees it; the first token of a document is never trained."""
    text = Text()
    for trained, run in groupby(zip(tokens.tolist(), labels.tolist(), strict=True), _is_trained):
        part = tokenizer.decode([token for token, _ in run])
        marked = f"«{part}»" if trained and is_plain else part
        text.append(marked, style="bold green" if trained else "dim")
    return text


def _is_trained(pair: tuple[int, int]) -> bool:
    return pair[1] >= 0
