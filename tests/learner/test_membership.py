"""Ranks prove to each other that they have the run's key; whatever else takes a rank's place is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncrl.learner.ranks.membership import NotOfThisRunError, answer, prove

KEY, ANOTHER = b"k" * 32, b"a" * 32


def challenge(by: int, to: int) -> bytes:
    return bytes([by, to]) * 16


class Scripted:
    """An exchange in which the other ranks say what a test has them say: first their challenges, then the answers to
    those that this rank sent."""

    def __init__(self, rank: int, size: int, keys: Sequence[bytes]) -> None:
        self._rank, self._size, self._keys = rank, size, keys
        self.sent: list[list[bytes]] = []

    def __call__(self, messages: Sequence[bytes]) -> list[bytes]:
        self.sent.append(list(messages))
        if len(self.sent) == 1:
            return [messages[r] if r == self._rank else challenge(r, self._rank) for r in range(self._size)]
        return [self.answer_of(r) for r in range(self._size)]

    def answer_of(self, other: int) -> bytes:
        own = self.sent[0][other] if other == self._rank else challenge(other, self._rank)
        return answer(self._keys[other], other, self._rank, self.sent[0][other], own)


class Mirror(Scripted):
    """A stranger in the place of rank 1, which returns what it is sent."""

    def answer_of(self, other: int) -> bytes:
        return self.sent[1][other] if other == 1 else super().answer_of(other)


class Recording(Scripted):
    """A stranger that says again what rank 1 answered to another challenge."""

    def answer_of(self, other: int) -> bytes:
        if other == 1:
            return answer(KEY, 1, self._rank, b"x" * 32, challenge(1, self._rank))
        return super().answer_of(other)


class Short(Scripted):
    def answer_of(self, other: int) -> bytes:
        return super().answer_of(other)[: 16 if other == 1 else None]


class Empty(Scripted):
    """A stranger that asks for nothing."""

    def __call__(self, messages: Sequence[bytes]) -> list[bytes]:
        given = super().__call__(messages)
        return [given[0], b"", given[2]] if len(self.sent) == 1 else given


@pytest.mark.parametrize("rank", range(3))
def test_ranks_with_the_key_admit_each_other(rank: int) -> None:
    said = Scripted(rank, 3, [KEY] * 3)
    prove(said, KEY, rank, 3)
    expected = [answer(KEY, rank, r, challenge(r, rank), said.sent[0][r]) for r in range(3) if r != rank]
    assert [given for r, given in enumerate(said.sent[1]) if r != rank] == expected


@pytest.mark.parametrize(("rank", "forged"), [(0, 1), (0, 2), (1, 0), (2, 0)])
def test_a_rank_without_the_key_is_refused_by_rank_0_and_a_rank_0_by_each(rank: int, forged: int) -> None:
    keys = [ANOTHER if r == forged else KEY for r in range(3)]
    with pytest.raises(NotOfThisRunError, match=f"came as rank {forged} of the learner does not have this run's key"):
        prove(Scripted(rank, 3, keys), KEY, rank, 3)


@pytest.mark.parametrize("stranger", [Mirror, Recording, Short, Empty])
def test_nothing_that_a_stranger_has_seen_is_an_answer(stranger: type[Scripted]) -> None:
    with pytest.raises(NotOfThisRunError, match="came as rank 1"):
        prove(stranger(0, 3, [KEY] * 3), KEY, 0, 3)


def test_each_challenge_is_new_and_for_one_rank() -> None:
    one, two = Scripted(0, 3, [KEY] * 3), Scripted(0, 3, [KEY] * 3)
    prove(one, KEY, 0, 3)
    prove(two, KEY, 0, 3)
    assert len({*one.sent[0], *two.sent[0]}) == 6
