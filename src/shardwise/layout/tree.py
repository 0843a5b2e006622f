"""Sums over micro-batches in one fixed order: the tree, its nodes, and who computes which leaf.

Floating-point sums depend on their order, and the order of a usual reduction depends on how many
ranks there are. Here the order is a property of the batch: micro-batch i is leaf i of one binary
tree, padded to a power of two, and every sum follows that tree, whoever holds its parts.

    12 micro-batches      level 3   .-------- 0..7 --------.      .---- 8..11 ----.
    (leaves 12..15        level 2   0..3            4..7          8..11
    do not exist)         level 1   0,1   2,3       4,5   6,7     8,9   10,11
                          level 0   0  1  2  3      4  5  6  7    8  9  10  11

A partial sum is a `Node`. Two siblings become their parent by one addition, which is commutative
bit for bit; a node whose sibling does not exist stands for its parent as it is. What does not exist
counts as zero (the engine adds +0.0 to the total, so that -0.0 cannot tell the difference).

Who computes what (`Schedule`): replicas take contiguous ranges, so that each ends with few nodes
(at most 2 log2 M, one where the split is aligned); the ranks of a shard axis take turns, so that
the leaves of a round are neighbours and what an owner of shards has to keep is few nodes too. A
rank without a micro-batch in a round runs a spare one, which is not counted.

The idea of a fixed tree is old (Demmel and Nguyen, "Fast reproducible floating-point summation",
2013, name it as the simplest of its kind); cutting by micro-batch makes it independent of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of leaves `start` .. `stop` - 1, a multiple of 2**level."""

    level: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + (1 << self.level)

    @property
    def sibling(self) -> Node:
        return Node(self.level, self.start ^ (1 << self.level))

    @property
    def parent(self) -> Node:
        return Node(self.level + 1, self.start & ~(1 << self.level))


def height(num_leaves: int) -> int:
    """Level of the root: the tree is padded to 2**height leaves."""
    return max(0, num_leaves - 1).bit_length()


def maximal_nodes(leaves: Iterable[int]) -> tuple[Node, ...]:
    """The fewest nodes that hold these leaves and no others, from left to right."""
    forest: Forest[None] = Forest(lambda a, b: None)
    for leaf in leaves:
        forest.put(Node(0, leaf), None)
    return tuple(sorted(forest.nodes, key=lambda node: node.start))


class Forest(Generic[T]):
    """Partial sums that wait for their siblings. `add(a, b)` may overwrite either operand."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: dict[Node, T] = {}
        self.leaves: set[int] = set()

    def put(self, node: Node, value: T) -> None:
        """Put a partial sum in, and join it with its siblings as far as they are there."""
        span = range(node.start, node.stop)
        if not self.leaves.isdisjoint(span):
            raise ValueError(f"leaves {span.start} to {span.stop - 1} are in the sum already")
        self.leaves.update(span)
        while node.sibling in self.nodes:
            other, left = self.nodes.pop(node.sibling), node.start < node.sibling.start
            value = self._add(value, other) if left else self._add(other, value)
            node = node.parent
        self.nodes[node] = value

    def sum_of(self, node: Node) -> T | None:
        """Take out the sum of everything below `node`; None where nothing is."""
        below = [n for n in self.nodes if node.start <= n.start and n.stop <= node.stop]
        return fold({n: self.nodes.pop(n) for n in below}, node.level, self._add)


def fold(nodes: dict[Node, T], level: int, add: Callable[[T, T], T]) -> T | None:
    """The sum, in tree order, of disjoint nodes below one node of `level`; None of nothing."""
    nodes = dict(nodes)
    for at in range(level):
        for node in sorted(n for n in nodes if n.level == at):
            if node not in nodes:
                continue  # it was the sibling of the one before
            value, other = nodes.pop(node), nodes.pop(node.sibling, None)
            nodes[node.parent] = value if other is None else add(value, other)
    (result,) = nodes.values() if nodes else (None,)
    return result


class Holdings(NamedTuple):
    """The partial sums that each of several holders has when its rounds are over."""

    height: int
    nodes: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """Which rank computes which micro-batch of a step."""

    num_micro_batches: int
    replicas: int
    shards: int

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches: expected >= 1, found {self.num_micro_batches}")

    def span(self, replica: int) -> range:
        """The micro-batches of a replica, which its shard axis shares."""
        num, parts = self.num_micro_batches, self.replicas
        return range(replica * num // parts, (replica + 1) * num // parts)

    @cached_property
    def num_rounds(self) -> int:
        """Passes of every rank in a step, spare ones included."""
        longest = max(len(self.span(r)) for r in range(self.replicas))
        return -(-longest // self.shards)

    def leaf(self, round: int, replica: int, shard: int) -> int | None:
        """The micro-batch of a rank in a round; None: it has none, and runs a spare one."""
        span, at = self.span(replica), round * self.shards + shard
        return span[at] if at < len(span) else None

    def leaves(self, round: int, replica: int) -> tuple[int | None, ...]:
        """`leaf` of every rank of a replica's shard axis."""
        return tuple(self.leaf(round, replica, s) for s in range(self.shards))

    @cached_property
    def by_replica(self) -> Holdings:
        """What the replicas hold of tensors that are sharded inside of each."""
        held = tuple(maximal_nodes(self.span(r)) for r in range(self.replicas))
        return Holdings(self.height, held)

    @cached_property
    def by_rank(self) -> Holdings:
        """What the ranks hold, replica by replica, of tensors that are whole on each."""
        held = tuple(
            maximal_nodes(
                i for k in range(self.num_rounds) if (i := self.leaf(k, r, s)) is not None
            )
            for r in range(self.replicas)
            for s in range(self.shards)
        )
        return Holdings(self.height, held)

    @property
    def height(self) -> int:
        return height(self.num_micro_batches)


def canonical_sum(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """The sum of all leaves in tree order: what every schedule must come to."""
    nodes = {Node(0, i): value for i, value in enumerate(values)}
    total = fold(nodes, height(len(nodes)), add)
    if total is None:
        raise ValueError("a sum of no leaves")
    return total
