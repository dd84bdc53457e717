"""Finds the prompt ids for a request's messages, since a request does not name the conversation that it continues.

A message of the policy is recognised by itself and the messages before it. The prompt keeps the sampled ids up to the
end of that message, and only the rest is rendered. Other messages (an edited history, a summary) are rendered in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.actors.endpoint.deduplication import DistinctRequest
from asyncrl.actors.endpoint.replies import Choice
from asyncrl.actors.endpoint.requests import BadRequest, plain
from asyncrl.data.base import Message
from asyncrl.rendering.template import Renderer, ToolSchema, warn_of_prefix_break


@dataclass(frozen=True, slots=True)
class _Turn:
    ids: list[int]
    """The prompt and the sampled tokens."""
    sampled: int
    """Number of sampled tokens, at the end of `ids`."""
    closed: bool
    """Whether `ids` ends with a stop token."""
    requests: list[DistinctRequest]
    """The requests with this reply: one, or several whose replies read the same."""


class Conversations:
    """The conversations of one episode, any number of them, which may run in parallel and branch."""

    def __init__(self, renderer: Renderer) -> None:
        self.breaks = 0
        """How often the template changed earlier tokens, so that a whole conversation was rendered again."""
        self._renderer = renderer
        self._turns: dict[bytes, _Turn] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of `messages`, ending where the assistant speaks. Raises BadRequest if the template refuses them."""
        try:
            return self._continued(messages, tools) or self._renderer.render_initial(messages, tools)
        except BaseException as error:  # a template may raise anything, and nothing is awaited here
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        prompt: Sequence[int],
        choice: Choice,
        request: DistinctRequest,
    ) -> None:
        """Record that the policy answered `messages`, rendered as `prompt`, with `choice`, one of `request`."""
        sampled = choice.token_ids
        closed = len(sampled) > 0 and sampled[-1] in self._renderer.stop_token_ids
        key = _keys([*messages, plain(choice.message)], tools)[-1]
        earlier = self._turns[key].requests if key in self._turns else []
        self._turns[key] = _Turn([*prompt, *sampled], len(sampled), closed, [*earlier, request])

    def _continued(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        keys = _keys(messages, tools)
        for key in keys:
            if key in self._turns:
                _mark_contained(self._turns[key].requests)
        for n in range(len(messages), 0, -1):
            if (turn := self._turns.get(keys[n - 1])) is None:
                continue
            tail = self._renderer.render_tail(
                messages[:n], messages[n:], tools, closed=turn.closed, row=turn.ids, sampled=turn.sampled
            )
            if tail is not None:
                return turn.ids + tail
            self.breaks += 1
            warn_of_prefix_break(messages[n]["role"] if n < len(messages) else "assistant")
            return None
        return None


def _mark_contained(requests: Sequence[DistinctRequest]) -> None:
    """Record that a later request contains the reply of one of `requests`, which read the same. Marks the first that is
    not known to be lost, else the last; none if one is known to be received."""
    if not any(request.certainly_received for request in requests):
        next((request for request in requests if not request.certainly_lost), requests[-1]).contained = True


def _keys(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[bytes]:
    """One key for each prefix of `messages`."""
    key = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    keys = []
    for message in messages:
        # Most agents do not send the reasoning back.
        hashed = {name: value for name, value in message.items() if name != "reasoning_content"}
        key.update(json.dumps(hashed, sort_keys=True).encode() + b"\n")
        keys.append(key.copy().digest())
    return keys
