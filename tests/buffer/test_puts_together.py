"""An actor's client sends together what is put while an answer is awaited; each put has its own outcome."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer import record
from asyncrl.buffer.client import AsyncBufferClient, BufferClient, BufferRefused, BufferTimeout
from asyncrl.trajectory import TicketId, Trajectory
from tests.buffer.fakes import trajectory
from tests.buffer.processes import BufferProcess

LEARNER = {"groups_per_step": 16, "group_size": 2, "steps": 100}


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path / "run", learner=LEARNER, buffer={"capacity": 64})
    process.start()
    yield process
    process.close()


def played(client: BufferClient, count: int) -> list[Trajectory]:
    return [trajectory(t) for t in client.tickets("actor-0", (0, 0), count, [], 5.0).tickets]


def requests_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trajectories each put request carries, as they are sent."""
    sizes: list[int] = []
    ask = AsyncBufferClient._ask

    async def counted(client: AsyncBufferClient, request: Any, frames: Sequence[Any] = ()) -> Any:
        sizes.append(len(frames))
        return await ask(client, request, frames)

    monkeypatch.setattr(AsyncBufferClient, "_ask", counted)
    return sizes


def test_each_has_its_outcome_and_few_requests_carry_them(
    buffer: BufferProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.learner()
    made = played(buffer.client("actor-0"), 20)
    assert len(made) == 20
    never_lent = dataclasses.replace(made[3], id=dataclasses.replace(made[3].id, group=999))
    no_number = dataclasses.replace(made[5], reward=float("nan"))
    sent = [*made[:3], never_lent, made[4], no_number, *made[6:], made[0]]
    sizes = requests_of(monkeypatch)

    async def put() -> list[Any]:
        client = AsyncBufferClient(buffer.address, identity="actor-0")
        outcomes = await asyncio.gather(*map(client.put, sent), return_exceptions=True)
        alone = await client.put(made[3])
        await client.close()
        return [*outcomes, alone]

    *outcomes, again, alone = asyncio.run(put())
    refused = {i: o.code for i, o in enumerate(outcomes) if isinstance(o, BufferRefused)}
    assert refused == {3: "unknown_ticket", 5: "malformed"}
    assert [o for i, o in enumerate(outcomes) if i not in refused] == ["stored"] * 18
    assert (again, alone) == ("duplicate", "stored")
    assert (max(sizes), sum(sizes)) == (8, 22)
    status = buffer.client().status()["service"]
    assert (status["puts"], status["refused"]) == (19, 1)


def test_who_no_longer_waits_changes_nothing_for_the_others(buffer: BufferProcess) -> None:
    buffer.learner()
    made = played(buffer.client("actor-0"), 12)

    async def put() -> list[Any]:
        client = AsyncBufferClient(buffer.address, identity="actor-0")
        tasks = [asyncio.create_task(client.put(t)) for t in made]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        return outcomes

    outcomes = asyncio.run(put())
    assert [type(o) for o in outcomes[::3]] == [asyncio.CancelledError] * 4
    assert [o for i, o in enumerate(outcomes) if i % 3] == ["stored"] * 8


def test_without_an_answer_each_ends_as_a_timeout_and_at_close_as_cancelled(tmp_path: Path) -> None:
    made = [trajectory(TicketId(0, 0, i)) for i in range(20)]

    async def put() -> None:
        client = AsyncBufferClient(f"ipc://{tmp_path}/nobody", identity="actor-0", deadline_s=0.2)
        outcomes = await asyncio.gather(*map(client.put, made), return_exceptions=True)
        assert {type(o) for o in outcomes} == {BufferTimeout}
        left = [asyncio.create_task(client.put(t)) for t in made]
        await asyncio.sleep(0.05)
        await client.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 60)
        assert {type(o) for o in outcomes} == {asyncio.CancelledError}

    asyncio.run(put())


def test_a_record_too_large_for_the_buffers_socket_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would disconnect the actor at every attempt, and the put would never be answered."""
    small, large = trajectory(TicketId(0, 0, 0), tokens=4), trajectory(TicketId(0, 0, 1), tokens=400)
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", len(record.to_record(large)) - 1)
    asked: list[int] = []

    async def fake_ask(client: AsyncBufferClient, request: Any, frames: Sequence[Any] = ()) -> Any:
        asked.append(len(frames))
        return ["stored"] * len(frames)

    monkeypatch.setattr(AsyncBufferClient, "_ask", fake_ask)

    async def put(sent: Sequence[Trajectory]) -> list[Any]:
        client = AsyncBufferClient(f"ipc://{tmp_path}/none", identity="actor-0")
        outcomes = await asyncio.gather(*map(client.put, sent), return_exceptions=True)
        await client.close()
        return outcomes

    first, refused, last = asyncio.run(put([small, large, small]))
    assert [first, last] == ["stored", "stored"]
    assert isinstance(refused, BufferRefused)
    assert refused.code == "too_large"
    assert "lower actors.top_k or actors.max_kept" in str(refused)
    asyncio.run(put([large]))
    assert sum(asked) == 2, "nothing of it was sent"
    client = BufferClient(f"ipc://{tmp_path}/none", identity="actor-0")
    with pytest.raises(BufferRefused, match=r"0\.0\.1 has .* bytes, 0 of them kept ids"):
        client.put(large)
    client.close()
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", len(record.to_record(large)))
    assert asyncio.run(put([large])) == ["stored"], "the bound itself is taken"
