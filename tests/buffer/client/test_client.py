"""The client's end of the wire: what it reads, and what it says of a reply that cannot be read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq

from asyncrl.buffer.client import AsyncBufferClient
from asyncrl.wire import MAX_HEADER_BYTES, WireError
from tests.buffer.processes import BufferProcess

PROMPT_BYTES = MAX_HEADER_BYTES // 4
LARGE_TASKS = f"""
class Large:
    train_size, held_out_size = None, 0
    def task(self, index):
        return {{"id": f"large-{{index}}", "prompt": "x" * {PROMPT_BYTES}}}
"""


def test_tickets_bring_tasks_of_any_size(tmp_path: Path) -> None:
    """One answer holds as many as the actor has free slots: with long contexts or pictures that is many megabytes."""
    (tmp_path / "large.py").write_text(LARGE_TASKS)
    buffer = BufferProcess(tmp_path / "run", data={"source": f"{tmp_path}/large.py:Large"}, eval={"tasks": 0})
    buffer.start()
    try:
        buffer.learner()
        blocking = buffer.client("actor-0").tickets("actor-0", (0, 0), 4, [], 5.0).tickets
        assert [len(ticket.task["prompt"]) for ticket in blocking] == [PROMPT_BYTES] * 4

        async def ask() -> int:
            client = AsyncBufferClient(buffer.address, identity="actor-1")
            tickets = (await client.tickets("actor-1", (0, 0), 4, [], 5.0)).tickets
            await client.close()
            return len(tickets)

        assert asyncio.run(ask()) == 4
    finally:
        buffer.close()


def test_a_reply_that_cannot_be_read_is_said_at_once_and_not_taken_for_silence(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/garbled"
    with zmq.Context.instance().socket(zmq.ROUTER) as router:
        router.bind(address)

        async def ask() -> None:
            client = AsyncBufferClient(address, identity="actor-0", deadline_s=20.0)
            asking = asyncio.create_task(client.hello("actor"))
            peer, *_ = await asyncio.to_thread(router.recv_multipart)
            router.send_multipart([peer, b"\xff"])
            with pytest.raises(WireError, match="header cannot be read"):
                await asyncio.wait_for(asking, 10.0)
            await client.close()

        asyncio.run(ask())
