"""The order in which training samples are read: a function of seed and position, nothing else.

Position p of a run lies in epoch p // n and is sample `permutation(seed, epoch)[p % n]`. The
permutation is never stored: a Feistel network (Luby and Rackoff, 1988) over the next even power of
two, walked until it lands below n ("cycle walking", Black and Rogaway, 2002), maps one position to
one sample with O(1) memory. So resuming needs one integer, every rank can read its own part, and
each sample is read exactly once per epoch whatever the world size is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_NUM_ROUNDS = 6  # 4 suffice in theory for a good permutation; small domains mix better with more
_U64 = np.uint64


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al., 2014): every input bit changes half of the output
    bits."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Maps positions of a run (0, 1, 2, ...) to indices of `num_samples` samples."""

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"an order needs at least one sample, got {self.num_samples}")

    def indices(self, start: int, count: int) -> Int64Array:
        """Sample indices of positions start .. start + count - 1."""
        positions = np.arange(start, start + count, dtype=np.uint64)
        epochs, offsets = np.divmod(positions, _U64(self.num_samples))
        result = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permute(offsets[chosen], int(epoch))
        return result

    def _permute(self, x: NDArray[np.uint64], epoch: int) -> Int64Array:
        n = self.num_samples
        half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        keys = self._round_keys(epoch)
        x = self._feistel(x, half_bits, keys)
        while (outside := x >= _U64(n)).any():
            x[outside] = self._feistel(x[outside], half_bits, keys)
        return x.astype(np.int64)

    def _round_keys(self, epoch: int) -> NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            base = _mix(np.array([self.seed % 2**64], dtype=np.uint64) + _U64(0x9E3779B97F4A7C15))
            base = _mix(base ^ _mix(np.array([epoch + 1], dtype=np.uint64)))
            steps = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * _U64(0x9E3779B97F4A7C15)
            return _mix(base + steps)

    @staticmethod
    def _feistel(
        x: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        bits, mask = _U64(half_bits), _U64((1 << half_bits) - 1)
        left, right = x >> bits, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << bits) | right
