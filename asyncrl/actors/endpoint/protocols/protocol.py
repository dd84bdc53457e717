"""What a protocol is: pure functions between its own requests and replies and those of OpenAI's chat completions.

    its request ──read──> ChatBody ──session──> chat completion ──answer──> its reply ──events──> the same as a stream

Everything behind the endpoint (conversations, retries, delivery, rows) knows chat completions only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.actors.endpoint.requests import ChatBody
from asyncrl.data.base import Message

Json = dict[str, Any]
Histories = Mapping[str, Sequence[Message]]
"""Conversations by the id of the reply that ends them, for protocols whose requests continue one by its id."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    chat: ChatBody
    """The request as a chat completion."""
    sent: Json
    """The request as it was sent."""
    history: Sequence[Message] = ()
    """The messages that a later request continues when it names the reply to this one."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol: where it is served, and how it is translated."""

    paths: tuple[str, ...]
    """Paths of its requests, below the URL of the episode."""
    read: Callable[[bytes, Histories], Asked]
    """Translates a request's body. Raises BadRequest."""
    answer: Callable[[Asked, Json], Json]
    """The reply for a chat completion."""
    events: Callable[[Asked, Json], str]
    """The reply as server-sent events."""
    error: Callable[[str, str, str | None, str | None], Json]
    """(message, kind, field, code) -> the body of an error."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Field of a chat completion -> the protocol's name for it."""


def server_sent(events: Iterable[Json]) -> str:
    """Named events, as both streams of typed events have them."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
