"""Sums over micro-batches: any split among ranks follows the one tree, few nodes travel.

Values are nested pairs, so two sums are equal only when every addition had the same operands.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.tree import (
    Forest,
    Node,
    Schedule,
    canonical_sum,
    fold,
    height,
    maximal_nodes,
)

NUM = st.integers(1, 70)
SIZES = st.integers(1, 9)


def pair(a: object, b: object) -> object:
    return (a, b)


@given(st.integers(0, 100), st.integers(0, 100))
def test_maximal_nodes_tile_a_range_and_are_few(start: int, length: int) -> None:
    nodes = maximal_nodes(range(start, start + length))
    covered = [leaf for n in nodes for leaf in range(n.start, n.stop)]
    assert covered == list(range(start, start + length))
    assert all(n.start % (1 << n.level) == 0 for n in nodes)
    assert len(nodes) <= max(1, 2 * math.ceil(math.log2(start + length + 1)))
    assert not any(n.sibling in nodes for n in nodes)  # none could be joined


@given(NUM, SIZES, SIZES)
def test_every_micro_batch_is_computed_once(num: int, replicas: int, shards: int) -> None:
    plan = Schedule(num, replicas, shards)
    rounds = range(plan.num_rounds)
    computed = [i for k in rounds for r in range(replicas) for i in plan.leaves(k, r)]
    assert sorted(i for i in computed if i is not None) == list(range(num))
    assert computed.count(None) == plan.num_rounds * replicas * shards - num
    assert plan.num_rounds == math.ceil(math.ceil(num / replicas) / shards)  # no more than needed


@given(NUM, SIZES, SIZES, st.randoms(use_true_random=False))
def test_any_schedule_follows_the_one_tree(num: int, replicas: int, shards: int, random) -> None:
    """Leaves of a round arrive in any order, replicas send the nodes that they hold."""
    plan = Schedule(num, replicas, shards)
    everything: dict[Node, object] = {}
    for replica in range(replicas):
        forest: Forest[object] = Forest(pair)
        for k in range(plan.num_rounds):
            leaves = [i for i in plan.leaves(k, replica) if i is not None]
            random.shuffle(leaves)
            for leaf in leaves:
                forest.put(Node(0, leaf), leaf)
            assert len(forest.nodes) <= 2 * plan.height + shards
        held = plan.by_replica.nodes[replica]
        assert set(forest.nodes) == set(held)
        everything |= {n: forest.sum_of(n) for n in held}
        assert not forest.nodes
    assert fold(everything, plan.height, pair) == canonical_sum(range(num), pair)


@given(NUM, SIZES, SIZES)
def test_whole_tensors_follow_it_too(num: int, replicas: int, shards: int) -> None:
    """Parameters without dims: every rank keeps its own leaves until the end."""
    plan = Schedule(num, replicas, shards)
    nodes = [n for held in plan.by_rank.nodes for n in held]
    leaves = dict(enumerate(range(num)))
    sums = {
        n: fold({Node(0, i): leaves[i] for i in range(n.start, n.stop)}, n.level, pair)
        for n in nodes
    }
    assert sorted(i for n in nodes for i in range(n.start, n.stop)) == list(range(num))
    assert fold(sums, plan.height, pair) == canonical_sum(range(num), pair)


def test_what_does_not_exist_is_passed_over() -> None:
    assert canonical_sum(range(6), pair) == (((0, 1), (2, 3)), (4, 5))
    assert canonical_sum("a", pair) == "a"
    assert [height(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_a_leaf_counts_once() -> None:
    forest: Forest[int] = Forest(lambda a, b: a + b)
    forest.put(Node(0, 4), 1)
    forest.put(Node(0, 5), 1)
    with pytest.raises(ValueError, match="leaves 4 to 4 are in the sum already"):
        forest.put(Node(0, 4), 1)
    assert forest.sum_of(Node(3, 0)) == 2
    assert forest.sum_of(Node(3, 0)) is None


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="num_micro_batches: expected >= 1, found 0"):
        Schedule(0, 1, 1)
