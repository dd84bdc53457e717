"""Recorded turns leave an actor in their order, one request at a time, and each gets its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import AsyncBufferClient, BufferRefused, BufferTimeout
from asyncrl.buffer.client.messages import MAX_PUTS, Refusal, TurnRequest
from asyncrl.buffer.client.turns import TurnSender
from asyncrl.wire import Frame
from tests.buffer.processes import CONFIG, BufferProcess
from tests.buffer.tickets.test_turns import answer, episode, sample


class FakeBuffer:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.requests: list[list[bytes]] = []
        self.under_way = 0
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    async def ask(self, request: TurnRequest, frames: Sequence[Frame]) -> list[Any]:
        assert request.actor == "actor-0"
        self.under_way += 1
        assert self.under_way == 1, "turns of one attempt could pass each other"
        self.requests.append([bytes(frame) for frame in frames])
        said = await self.answers.get()
        self.under_way -= 1
        if isinstance(said, Exception):
            raise said
        return [said(bytes(frame)) for frame in frames]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_comes_while_a_reply_is_awaited_goes_together_in_order() -> None:
    async def go() -> None:
        buffer = FakeBuffer()
        sender = TurnSender(buffer.ask, "actor-0")
        names = [f"turn {n}".encode() for n in range(MAX_PUTS + 8)]
        waiting = [asyncio.create_task(sender.send(name)) for name in names]
        await settle()
        for _ in range(3):
            buffer.answers.put_nowait(lambda frame: "stored" if frame != b"turn 3" else "revoked")
        outcomes = await asyncio.gather(*waiting)
        assert [len(frames) for frames in buffer.requests] == [MAX_PUTS, 8]
        assert [frame for frames in buffer.requests for frame in frames] == names
        assert [n for n, outcome in enumerate(outcomes) if outcome == "revoked"] == [3]
        again = asyncio.create_task(sender.send(b"later"))  # the task before has ended
        assert await again == "stored"
        await sender.close()

    asyncio.run(go())


def test_a_refused_turn_and_a_failed_request_are_raised_where_they_are_awaited() -> None:
    async def go() -> None:
        buffer = FakeBuffer()
        sender = TurnSender(buffer.ask, "actor-0")
        waiting = [asyncio.create_task(sender.send(name)) for name in (b"good", b"bad", b"cancelled")]
        await settle()
        waiting[2].cancel()
        buffer.answers.put_nowait(lambda frame: "stored" if frame == b"good" else Refusal("bad_turn", "no"))
        good, bad, cancelled = await asyncio.gather(*waiting, return_exceptions=True)
        assert good == "stored"
        assert isinstance(bad, BufferRefused)
        assert isinstance(cancelled, asyncio.CancelledError)
        buffer.answers.put_nowait(BufferTimeout("no answer"))
        with pytest.raises(BufferTimeout):
            await sender.send(b"x")
        ending = asyncio.create_task(sender.send(b"y"))
        await settle()
        await sender.close()
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(go())


def test_the_actors_client_records_turns_and_gets_them_back(tmp_path: Path) -> None:
    process = BufferProcess(tmp_path / "run", buffer={**CONFIG["buffer"], "turns": "on"})
    process.start()

    async def go() -> None:
        client = AsyncBufferClient(process.address, identity="actor-0", deadline_s=60.0)
        tickets = (await client.tickets("actor-0", (0, 0), 3, [], 5.0)).tickets
        assert all(ticket.durable for ticket in tickets)
        turns = [client.turn(ticket.id, ticket.attempt, each) for each in episode(2) for ticket in tickets]
        assert await asyncio.gather(*turns) == ["stored"] * 15
        with pytest.raises(BufferRefused, match="expected intent 2"):
            await client.turn(tickets[0].id, 0, answer(3))
        await client.release("actor-0", [(tickets[0].id, 0)])
        assert await client.turn(tickets[0].id, 0, sample(2)) == "revoked"
        (again,) = (await client.tickets("actor-0", (0, 0), 1, [], 5.0)).tickets
        assert (again.id, len(again.turns)) == (tickets[0].id, 5)
        await client.close()

    try:
        process.learner()
        asyncio.run(go())
    finally:
        process.close()
