"""An agent that plays an example of docs/how-to/sdks.md through a relay, and writes down what the example received."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.plugins import resolve
from tests.sdks.relay import Relay


async def agent(
    task: Mapping[str, Any], client: Any, *, example: str, folder: str, faults: list[str], options: dict[str, Any]
) -> dict[str, float]:
    """Play `example`. `faults`: what happens to a reply of each episode, in turn (relay.py); after a stall the agent is
    cancelled and starts over. `folder`: one file is written into it per episode that ended."""
    draw = zlib.crc32(f"{task['id']}/{task['episode']}".encode())
    fault: Any = faults[draw % len(faults)]
    function = functools.partial(resolve(example, None, "example"), **options)
    async with Relay(str(client.base_url), fault, at=draw // 8 % 2) as relay:
        through = client.with_options(base_url=relay.base_url)

        async def play() -> Any:
            if inspect.iscoroutinefunction(function.func):
                return await function(task, through)
            return await asyncio.to_thread(function, task, through)

        playing = asyncio.ensure_future(play())
        stalled = asyncio.ensure_future(relay.stalled.wait())
        try:
            await asyncio.wait([playing, stalled], return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                playing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await playing
                playing = asyncio.ensure_future(play())
            reward: dict[str, float] = await playing
        finally:
            playing.cancel()
            stalled.cancel()
    played = {
        "task": task["id"],
        "index": task["episode"],
        "fault": fault,
        "broken": relay.broken,
        "reward": sum(reward.values()),
        "received": [[e.path, e.request, e.reply.decode()] for e in relay.received],
    }
    (Path(folder) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(played))
    return reward
