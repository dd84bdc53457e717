"""Calls that time out are made again, by the actor without a limit, by the learner for as long as it is patient."""

from __future__ import annotations

import asyncio
import doctest
import time
from collections.abc import Callable

import pytest

from asyncrl.buffer.client import BufferRefused, BufferTimeout, retry


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of both kinds of caller, which take no time."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(retry.time, "sleep", slept.append)
    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    return slept


def silent(times: int, error: type[Exception] = BufferTimeout) -> Callable[[], str]:
    """A call that is answered after so many time-outs."""
    left = [times]

    def call() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error("no answer")
        return "answer"

    return call


def test_the_schedule() -> None:
    assert doctest.testmod(retry).attempted > 0
    assert doctest.testmod(retry).failed == 0


def test_the_actor_repeats_without_a_limit_and_says_that_it_waits(waits: list[float]) -> None:
    told: list[bool] = []
    calls = retry.Calls(lambda: told.append(calls.silent))
    call = silent(9)

    async def ask() -> str:
        return call()

    assert asyncio.run(calls.until_answered("put", ask)) == "answer"
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]
    assert (told, calls.silent) == ([True] * 9, False)


def test_the_learner_repeats_while_it_may(waits: list[float]) -> None:
    assert retry.through_outages(silent(3), 10.0) == "answer"
    assert waits == [0.1, 0.2, 0.4]
    with pytest.raises(BufferTimeout):
        retry.through_outages(silent(1), 10.0, lambda: False)
    with pytest.raises(BufferTimeout):
        retry.through_outages(silent(1), 0.0)
    assert waits == [0.1, 0.2, 0.4]


def test_the_learner_repeats_until_its_patience_ends() -> None:
    began = time.monotonic()
    with pytest.raises(BufferTimeout):
        retry.through_outages(silent(99), 0.35)
    assert time.monotonic() - began >= 0.35


def test_a_refusal_is_not_repeated(waits: list[float]) -> None:
    def refused() -> None:
        raise BufferRefused("put", "malformed", "no")

    with pytest.raises(BufferRefused):
        retry.through_outages(refused, 5.0)
    assert waits == []
