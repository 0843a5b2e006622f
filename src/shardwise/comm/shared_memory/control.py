"""What a rank says about itself: its control block and its directory of buckets.

Both lie at the head of its arena. Every word has one writer, the owner; words that are written
together have a cache line of their own.

    byte  word  written               content
       0     0  once                  nonce (2 words), process id
      64     8  engine entered        entered: number of the phase
     128    16  phase left            left: number of the last phase that this rank has left
     192    24  after an exception    abandoned[phase & 1]: 2 * abandoned phase, + 1 once gone
     256    32  before `entered`      hash of the position; on each gather: bucket key + 1;
                                      watched: number of the phase in which tools watch collectives
     320    40  around each sleep     waiting: doorbell value that it sleeps on + 1, 0 when awake
     384    48  end of a backward     ended: number of the phase; each post: hash of what was posted
     448    56  agree                 agreed: phase << 16 | round; number of flags (2, by round)
     512    64  any rank              doorbell of the domain (rank 0's is used; the kernel adds)
     576    72  owner, as a barrier   a word that nobody reads
     640    80  before `entered`      text of the position, 384 bytes, ends at a zero byte
    1024   128  before `abandoned`    why, after the number of the phase; 1,024 bytes, as the text
    4096   512  before `agreed`       flags, two buffers of 2,048 bytes, one byte for each flag
    8192  1024  attach, post          directory: records of 256 bytes

    record  word  content
       0      0   state (0 none, 1 live, 2 released), offset, bytes, fingerprint of name and layout
      64      8   shard axis: tag of the last post (phase << 16 | count in the phase), offset of its
                  slot, its members as a mask (6 words)
     128     16   replicate axis: the same
     192     24   name, 64 bytes

Two words serve `abandoned`, because a rank may be one phase ahead of a slow peer (see domain.py).
"""

from __future__ import annotations

import hashlib
from typing import Any

from shardwise.comm.shared_memory.arena import Mapping

FLAGS_BYTES = 2048
_FLAGS_AT = 4096
_DIRECTORY_AT = 8192
_RECORD_BYTES = 256
_MAX_RECORDS = 1 << 20
HEAD_BYTES = _DIRECTORY_AT + _MAX_RECORDS * _RECORD_BYTES

DOORBELL_WORD = 64
FENCE_WORD = 72
_NONCE_BYTES = 16
_TEXT_AT, _TEXT_BYTES = 640, 384
_WHY_AT, _WHY_BYTES = 1024, 1024
_NAME_AT, _NAME_BYTES = 192, 64

MASK_WORDS = 6  # of 64 parameters each

LIVE, RELEASED = 1, 2
SHARD, REPLICATE = 0, 1  # the axis of a post


class Word:
    """One word of a block as an attribute; the block begins at word `_at` of `_words`."""

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, block: Any, owner: type | None = None) -> int:
        return block._words[block._at + self._index]

    def __set__(self, block: Any, value: int) -> None:
        block._words[block._at + self._index] = value


class Control:
    """The control block of one rank, over the mapping of its arena."""

    pid = Word(2)
    entered = Word(8)
    left = Word(16)
    position = Word(32)
    at = Word(33)
    watched = Word(34)
    waiting = Word(40)
    ended = Word(48)
    posted = Word(49)
    agreed = Word(56)

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self._words, self._at = mapping.words, 0
        self._bytes = mapping.bytes

    @property
    def nonce(self) -> bytes:
        return bytes(self._bytes[:_NONCE_BYTES])

    @nonce.setter
    def nonce(self, value: bytes) -> None:
        self._bytes[:_NONCE_BYTES] = value

    @property
    def text(self) -> str:
        return _read(self._bytes, _TEXT_AT, _TEXT_BYTES)

    @text.setter
    def text(self, value: str) -> None:
        _write(self._bytes, _TEXT_AT, _TEXT_BYTES, value)

    def why_abandoned(self, phase: int) -> str:
        number, _, why = _read(self._bytes, _WHY_AT, _WHY_BYTES).partition(" ")
        return why if number == str(phase) else ""

    def say_why(self, phase: int, why: str) -> None:
        _write(self._bytes, _WHY_AT, _WHY_BYTES, f"{phase} {why}")

    def has_abandoned(self, phase: int) -> bool:
        return self._words[24 + (phase & 1)] >> 1 == phase

    def has_gone(self, phase: int) -> bool:
        """It abandoned the phase and no longer waits for peers that read its shards."""
        return self._words[24 + (phase & 1)] == 2 * phase + 1

    def mark_abandoned(self, phase: int, *, gone: bool) -> None:
        self._words[24 + (phase & 1)] = 2 * phase + gone

    def num_flags(self, round_: int) -> int:
        return self._words[57 + (round_ & 1)]

    def read_flags(self, round_: int, count: int) -> bytes:
        start = _FLAGS_AT + (round_ & 1) * FLAGS_BYTES
        return bytes(self._bytes[start : start + count])

    def write_flags(self, round_: int, flags: bytes, num_flags: int) -> None:
        self._words[57 + (round_ & 1)] = num_flags
        start = _FLAGS_AT + (round_ & 1) * FLAGS_BYTES
        self._bytes[start : start + len(flags)] = flags

    def record(self, key: int) -> Record:
        return Record(self, key)


class Record:
    """One bucket in a rank's directory."""

    __slots__ = ("_at", "_bytes", "_words")
    state = Word(0)
    offset = Word(1)
    size_bytes = Word(2)
    fingerprint = Word(3)

    def __init__(self, control: Control, key: int) -> None:
        if key >= _MAX_RECORDS:
            raise MemoryError(
                f"a process group serves {_MAX_RECORDS} buckets in its life; make a new one"
            )
        self._bytes, self._words = control._bytes, control._words
        self._at = (_DIRECTORY_AT + key * _RECORD_BYTES) // 8

    @property
    def name(self) -> str:
        return _read(self._bytes, self._at * 8 + _NAME_AT, _NAME_BYTES)

    def publish(self, name: str, offset: int, size_bytes: int, fingerprint: int) -> None:
        """Fill the record in. Peers read it after an entry fence, which orders it."""
        # The end of a long name says more than its start.
        _write(self._bytes, self._at * 8 + _NAME_AT, _NAME_BYTES, name[-_NAME_BYTES + 1 :])
        self.offset, self.size_bytes, self.fingerprint = offset, size_bytes, fingerprint
        self.state = LIVE

    def mark_released(self) -> None:
        self.state = RELEASED

    def tag(self, axis: int) -> int:
        return self._words[self._at + 8 + 8 * axis]

    def slot(self, axis: int) -> int:
        return self._words[self._at + 9 + 8 * axis]

    def set_slot(self, axis: int, offset: int) -> None:
        self._words[self._at + 9 + 8 * axis] = offset

    def members(self, axis: int, num_params: int) -> tuple[int, ...] | None:
        """Which parameters of the bucket the last post is about; None when they are too many."""
        if num_params > 64 * MASK_WORDS:
            return None
        start = self._at + 10 + 8 * axis
        mask = sum(self._words[start + k] << 64 * k for k in range(-(-num_params // 64)))
        return tuple(i for i in range(num_params) if mask >> i & 1)

    def set_members(self, axis: int, mask_words: tuple[int, ...]) -> None:
        start = self._at + 10 + 8 * axis
        for k, word in enumerate(mask_words[:MASK_WORDS]):
            self._words[start + k] = word

    def set_tag(self, axis: int, tag: int) -> None:
        self._words[self._at + 8 + 8 * axis] = tag


def hash_of(*parts: object) -> int:
    """64 bits that are equal on ranks that pass equal parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read(memory: memoryview, start: int, size: int) -> str:
    return bytes(memory[start : start + size]).split(b"\0", 1)[0].decode(errors="replace")


def _write(memory: memoryview, start: int, size: int, text: str) -> None:
    data = text.encode()[: size - 1]
    memory[start : start + size] = data.ljust(size, b"\0")
