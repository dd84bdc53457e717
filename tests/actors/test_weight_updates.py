"""New weights for a running engine: damage, whenever it is found, leaves the engine as it was, and serving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.actors.weight_updates import WeightUpdates
from asyncrl.weights.protocol import WeightsCorrupt, WeightsVersion

NEWER = WeightsVersion(0, 3, "d")


class FakeWeights:
    id = NEWER
    closed = False

    def close(self) -> None:
        self.closed = True


class FakeChannel:
    def __init__(self, damaged: bool) -> None:
        self.damaged, self.weights = damaged, FakeWeights()

    def latest(self) -> WeightsVersion:
        return NEWER

    def open(self, version: tuple[int, int] | None = None) -> Any:
        if self.damaged:
            raise WeightsCorrupt("a byte")
        return self.weights


class FakeEngine:
    """Notes what it is asked, and finds damage where it is told to."""

    held_version = (0, 1)

    def __init__(self, damage_at: str) -> None:
        self.damage_at, self.asked = damage_at, list[str]()

    async def _asked(self, what: str) -> None:
        self.asked.append(what)
        if what == self.damage_at:
            raise WeightsCorrupt("a checksum")

    async def check(self, weights: Any) -> None:
        await self._asked("check")

    async def pause(self, recompute_kv: bool) -> None:
        await self._asked("pause")

    async def load(self, weights: Any) -> None:
        await self._asked("load")
        self.held_version = weights.id.order

    async def resume(self) -> None:
        await self._asked("resume")


@pytest.mark.parametrize(
    ("where", "asked"),
    [("open", []), ("check", ["check"]), ("load", ["check", "pause", "load", "resume"])],
)
def test_damaged_weights_are_left_and_the_next_look_tries_again(where: str, asked: list[str]) -> None:
    engine, channel = FakeEngine(where), FakeChannel(where == "open")
    updates = WeightUpdates(engine, channel, recompute_kv=True)  # type: ignore[arg-type]
    assert asyncio.run(updates.look()) is False
    assert engine.asked == asked
    assert engine.held_version == (0, 1)
    assert not updates.loading
    assert updates.count == 0
    assert channel.weights.closed == (where != "open"), "what was lent is given back"
    engine.damage_at, channel.damaged = "", False
    assert asyncio.run(updates.look()) is True
    assert (engine.held_version, updates.count) == (NEWER.order, 1)


def test_what_was_opened_long_before_the_pause_came_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's GPU memory is lent for a minute, and a pause may wait longer for the running requests."""
    lent: list[FakeWeights] = []

    class Lender(FakeChannel):
        def open(self, version: tuple[int, int] | None = None) -> Any:
            lent.append(FakeWeights())
            return lent[-1]

    engine = FakeEngine("")
    loaded: list[Any] = []

    async def load(weights: Any) -> None:
        loaded.append((weights, weights.closed))
        engine.held_version = weights.id.order

    monkeypatch.setattr(engine, "load", load)
    monkeypatch.setattr("asyncrl.actors.weight_updates.REOPEN_S", -1.0)
    assert asyncio.run(WeightUpdates(engine, Lender(False), recompute_kv=True).look()) is True  # type: ignore[arg-type]
    assert loaded == [(lent[1], False)]
    assert [weights.closed for weights in lent] == [True, True]
    assert engine.asked == ["check", "pause", "check", "resume"]


def test_what_is_opened_may_be_older_than_what_was_announced_and_is_left() -> None:
    engine, channel = FakeEngine(""), FakeChannel(False)
    updates = WeightUpdates(engine, channel, recompute_kv=True)  # type: ignore[arg-type]
    assert asyncio.run(updates.look()) is True
    engine.asked.clear()
    channel.latest = lambda: WeightsVersion(0, 5, "d")  # type: ignore[method-assign]
    channel.weights = FakeWeights()
    assert asyncio.run(updates.look()) is False
    assert (engine.asked, engine.held_version, channel.weights.closed) == ([], NEWER.order, True)
