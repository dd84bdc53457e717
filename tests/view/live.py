"""What the tests of a live run share: its config, a made-up learner's step, the text of its tokens."""

from __future__ import annotations

import time
from typing import Any

from asyncrl.buffer.client import BufferClient
from asyncrl.tracking.rollouts.text import TokenText

LIVE: dict[str, Any] = {
    "learner": {"groups_per_step": 2, "group_size": 2, "ranks": 1, "backend": "torch"},
    "buffer": {"keep": "all"},
}
WORDS = TokenText(lambda ids: "".join(f"w{int(id)} " for id in ids))


def train(client: BufferClient, incarnation: int, b: int) -> None:
    """Takes batch `b`, applies and publishes it."""
    deadline = time.monotonic() + 60
    while (reply := client.batch(incarnation, b, 0, 1, 1.0)).state == "waiting":
        assert time.monotonic() < deadline
    assert reply.state == "ready"
    version = client.finished(incarnation, b, "applied")
    client.published(incarnation, 0, version, f"digest-{version}")
