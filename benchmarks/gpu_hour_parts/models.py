"""The decoders that are timed, and what they need of a device."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Size:
    """One decoder, and the tokens of a micro-batch of a rank."""

    name: str
    config: DecoderConfig
    num_tokens: int
    num_sequences: int = 1

    def make(self) -> Decoder:
        return Decoder(self.config, self.num_tokens)

    @property
    def num_params(self) -> int:
        """Near enough for what fits."""
        c = self.config
        kv = c.dim * c.num_kv_heads // c.heads
        block = c.dim * (2 * c.dim + 2 * kv) + 3 * c.dim * c.num_hidden
        return c.layers * block + 2 * c.vocab_size * c.dim

    def needs_bytes(self, ranks: int, precision: str, is_whole: bool) -> int:
        """About what a rank needs: weights, gradients and AdamW's moments in float32, all of them
        or a part; twice a gathered block with its gradient; activations; logits.
        """
        c = self.config
        kept = 16 * self.num_params // (1 if is_whole else ranks)
        width = 2 if precision == "bf16" else 4
        largest = max(
            (self.num_params - 2 * c.vocab_size * c.dim) // c.layers, c.vocab_size * c.dim
        )
        tokens = self.num_tokens * self.num_sequences
        saved = c.layers * tokens * (12 * c.dim + 4 * c.num_hidden) * width
        return kept + 6 * largest * width + saved + 3 * tokens * c.vocab_size * 4


def _size(
    name: str, dim: int, layers: int, heads: int, *, tokens: int = 2048, sequences: int = 1,
    kv: int = 0, hidden: int = 0, vocab: int = 32_000,
) -> Size:  # fmt: skip
    config = DecoderConfig(
        dim=dim, layers=layers, heads=heads, kv_heads=kv, hidden=hidden, vocab_size=vocab
    )
    return Size(name, config, tokens, sequences)


SIZES = {
    size.name: size
    for size in (
        _size("125M", 768, 12, 12, sequences=8),
        _size("350M", 1024, 24, 16, sequences=4),
        _size("1.3B", 2048, 24, 16, sequences=2),
        _size("3B", 3072, 26, 24, sequences=1),
        _size("8B", 4096, 32, 32, kv=8, hidden=14_336, vocab=128_256),
    )
}
DRY_SIZES = {"tiny": _size("tiny", 64, 2, 2, tokens=32, vocab=256)}


def sizes(is_dry: bool) -> dict[str, Size]:
    return DRY_SIZES if is_dry else SIZES
