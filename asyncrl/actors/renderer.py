"""Between messages and token ids, in one direction each: messages are rendered, sampled ids are parsed.

Sampled ids are never encoded again. After an assistant turn only the tail is rendered: what the chat template adds
between the ids that the policy sampled and the point where it samples next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl.data.base import Message

ToolSchema = Mapping[str, Any]
"""One tool in OpenAI form, `Tool.schema`."""


class Renderer(Protocol):
    """What the episode loop needs to know about a model's chat format."""

    stop_token_ids: tuple[int, ...]
    """A sampled id among these ends the assistant's turn. It is part of the sampled ids and carries loss."""

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of a whole conversation, ending where the assistant begins to speak. Starts a row."""
        ...

    def render_tail(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        closed: bool = True,
    ) -> list[int] | None:
        """The ids to append to a row after the sampled ids, ending where the assistant speaks again.

        `messages_before` ends with the assistant message that was parsed from those ids; `closed` says whether they end
        with a stop token (otherwise the tail closes the turn, as context). None: with the new messages the template
        changes what came before, so the row ends here and `render_initial` starts a new one.
        """
        ...

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The assistant message in sampled ids: `content`, and `tool_calls` if there are any. Never raises on them."""
        ...
