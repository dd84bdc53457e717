"""A server that the actor starts, when it dies: every episode finds the one that takes its place."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from asyncrl.actors.envs.adapters import server as adapter
from asyncrl.actors.envs.adapters.server import url_of


class FakeServer:
    """The first is dead. Whoever asks it second hears so only when another episode has put one in its place."""

    made: list[FakeServer]

    def __init__(self, server: Any, start_s: float) -> None:
        self.made.append(self)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked = 0

    async def url(self) -> str:
        self._asked += 1
        if self is not self.made[0]:
            return "http://second"
        if self._asked == 1:
            asyncio.get_running_loop().call_later(0.05, self.ended.set_result, None)
            return ""
        while len(self.made) == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return ""


def test_an_episode_waits_for_the_end_of_the_server_that_it_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeServer.made = []
    monkeypatch.setattr(adapter, "_StartedServer", FakeServer)

    async def episodes() -> list[str]:
        server = {"command": [sys.executable, "{port}"]}
        first = asyncio.ensure_future(url_of(server, 1.0))
        second = asyncio.ensure_future(url_of(server, 1.0))
        return list(await asyncio.wait_for(asyncio.gather(second, first), 60.0))

    assert asyncio.run(episodes()) == ["http://second"] * 2
    assert len(FakeServer.made) == 2


def test_a_program_that_is_not_there_is_named() -> None:
    server = {"command": ["gone/bin/python", "serve.py", "{port}"]}
    with pytest.raises(
        ConnectionError, match=r"server gone/bin/python serve\.py \d+: there is no program 'gone/bin/python'"
    ):
        asyncio.run(asyncio.wait_for(url_of(server, 5.0), 60.0))
