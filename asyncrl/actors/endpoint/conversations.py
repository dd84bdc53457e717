"""From the messages of a request to the ids to sample after, when nobody says which conversation goes on.

What the policy said is recognised by the messages before it and itself; behind it the sampled ids stand as they were
sampled, and only the tail is rendered. Messages that were never said this way (an edited history, a summary) are
rendered as a whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.actors.endpoint.deduplication import Call
from asyncrl.actors.endpoint.replies import Answer
from asyncrl.actors.endpoint.requests import BadRequest, plain
from asyncrl.actors.rendering.template import Renderer, ToolSchema, tell_prefix_break
from asyncrl.data.base import Message


@dataclass(frozen=True, slots=True)
class _Said:
    ids: list[int]
    sampled: int
    closed: bool
    calls: list[Call]
    """Whose answers these are: one, or several that read the same."""


class Conversations:
    """Of one episode: any number, beside each other and branching."""

    def __init__(self, renderer: Renderer) -> None:
        self.breaks = 0
        """How often the template changed what stood before, so that a whole conversation was rendered anew."""
        self._renderer = renderer
        self._said: dict[bytes, _Said] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of `messages`, ending where the assistant speaks. Raises BadRequest if the template refuses them."""
        try:
            return self._tail_of_what_was_said(messages, tools) or self._renderer.render_initial(messages, tools)
        except Exception as error:  # a template may raise anything
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from error

    def said(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        prompt: Sequence[int],
        answer: Answer,
        call: Call,
    ) -> None:
        """The policy answered `messages`, which are `prompt`, with `answer`, as one choice of `call`."""
        sampled = answer.token_ids
        closed = len(sampled) > 0 and sampled[-1] in self._renderer.stop_token_ids
        key = _keys([*messages, plain(answer.message)], tools)[-1]
        known = self._said[key].calls if key in self._said else []
        self._said[key] = _Said([*prompt, *sampled], len(sampled), closed, [*known, call])

    def _tail_of_what_was_said(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int] | None:
        keys = _keys(messages, tools)
        for key in keys:
            if key in self._said:
                _contains_one_of(self._said[key].calls)
        for n in range(len(messages), 0, -1):
            if (said := self._said.get(keys[n - 1])) is None:
                continue
            tail = self._renderer.render_tail(
                messages[:n], messages[n:], tools, closed=said.closed, row=said.ids, sampled=said.sampled
            )
            if tail is not None:
                return said.ids + tail
            self.breaks += 1
            tell_prefix_break(messages[n]["role"] if n < len(messages) else "assistant")
            return None
        return None


def _contains_one_of(calls: Sequence[Call]) -> None:
    """A request contains an answer that reads as those of `calls` do. Unless one of them is known to be received, it is
    one that is not known to be lost."""
    if not any(call.certainly_received for call in calls):
        next((call for call in calls if not call.certainly_lost), calls[-1]).contained = True


def _keys(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[bytes]:
    """One for each beginning of `messages`."""
    key = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    keys = []
    for message in messages:
        # Most agents do not send back what the model thought.
        told = {name: value for name, value in message.items() if name != "reasoning_content"}
        key.update(json.dumps(told, sort_keys=True).encode() + b"\n")
        keys.append(key.copy().digest())
    return keys
