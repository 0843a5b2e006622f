"""Who takes part in which round, without sockets."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.replicas.rounds import Member, Rounds


def joined(rounds: Rounds, name: str, world: int = 1) -> Member:
    seed = sum(map(ord, name))
    return [rounds.join(name, rank, world, seed) for rank in range(world)][-1]


def names(rounds: Rounds) -> list[str]:
    return [member.name for member in rounds.active]


def send(rounds: Rounds, *members: Member) -> None:
    for member in members:
        for rank in range(member.world):
            assert rounds.send(member, rank)


def test_the_first_round_begins_with_all_that_were_asked_for() -> None:
    rounds = Rounds(0, 2)
    a = joined(rounds, "a", world=2)
    assert names(rounds) == [] and a.is_ready
    rounds.join("b", 1, 2, 7)
    assert names(rounds) == []  # its other rank is not there
    b = rounds.join("b", 0, 2, 7)
    assert names(rounds) == ["a", "b"]
    rounds.send(a, 0)
    assert not a.has_sent
    send(rounds, a)
    assert not rounds.is_over
    send(rounds, b)
    assert rounds.is_over
    rounds.advance()
    assert rounds.number == 1 and not rounds.is_over and names(rounds) == ["a", "b"]


def test_who_joins_waits_for_the_next_round() -> None:
    rounds = Rounds(0, 1)
    a = joined(rounds, "a")
    assert names(rounds) == ["a"]
    b = joined(rounds, "b")
    assert names(rounds) == ["a"] and not rounds.send(b, 0)
    send(rounds, a)
    assert rounds.is_over
    rounds.advance()
    assert names(rounds) == ["a", "b"]


def test_a_death_ends_the_wait_of_the_others() -> None:
    rounds = Rounds(0, 2)
    a, b = joined(rounds, "a"), joined(rounds, "b")
    send(rounds, a)
    assert not rounds.is_over
    rounds.leave(b)
    assert rounds.is_over and b.is_gone
    rounds.advance()
    back = joined(rounds, "b")
    assert names(rounds) == ["a"] and back is not b
    send(rounds, a)
    rounds.advance()
    assert names(rounds) == ["a", "b"]


def test_where_nobody_is_left_the_next_begins_at_once() -> None:
    rounds = Rounds(5, 2)
    a, _ = joined(rounds, "a"), joined(rounds, "b")
    c = joined(rounds, "c")
    rounds.leave(a)
    assert not rounds.is_over  # b has not sent
    rounds.leave(rounds.members["b"])
    assert names(rounds) == ["c"] and rounds.number == 5 and not rounds.is_over
    rounds.leave(c)
    assert names(rounds) == []
    joined(rounds, "d")
    assert names(rounds) == ["d"]  # it has begun long ago: nobody waits for a second one


def test_late_ones_are_left_behind_until_the_next_round() -> None:
    rounds = Rounds(0, 2)
    a, b = joined(rounds, "a"), joined(rounds, "b", world=2)
    send(rounds, a)
    rounds.send(b, 0)  # one of its two ranks
    assert rounds.drop_late() == [b] and rounds.is_over
    assert not rounds.send(b, 1)
    rounds.advance()
    assert names(rounds) == ["a", "b"] and not b.sent


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (("b", 0, 1, 1), "run.seed: 1 is also that of replica 'a'"),
        (("a", 0, 1, 1), "a replica 'a' is there already"),
        (("a", 1, 3, 1), "'a' has 2 ranks and seed 1"),
        (("a", 5, 2, 1), "no rank 5 of 2"),
    ],
)
def test_who_cannot_take_part(again: tuple[str, int, int, int], said: str) -> None:
    rounds = Rounds(0, 2)
    rounds.join("a", 0, 2, 1)
    with pytest.raises(ConfigError, match=said):
        rounds.join(*again)
    assert list(rounds.members) == ["a"] and rounds.members["a"].ranks == {0}
