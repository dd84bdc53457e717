"""Compaction: when a row has used up its share of `env.max_tokens`, the policy sums the conversation up.

    row 1   task, turns ..., request ──> summary         every sampled token of both rows is trained on
    row 2   task, summary, "Go on" ──> turns ...         with the episode's reward

The summary is a turn of the policy like any other, sampled and trained on in the row that it ends; in the next row it
is context. The environment hears neither the request nor the summary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.data.base import Message
from asyncrl.errors import ConfigError
from asyncrl.rendering.template import Renderer

REQUEST = (
    "The conversation is close to its limit of length and will be replaced by a summary that you write now. Write down "
    "what you have found out and done so far, with every number and name that you still need, and what is left to do. "
    "Call no tool."
)
GO_ON = "This is your summary of the conversation so far. Go on with the task from here."


@dataclass(frozen=True, slots=True)
class Compaction:
    """When the conversation of an episode is replaced by a summary, and by what."""

    from_tokens: float
    """Length of a row, in tokens, from which it ends with a summary; inf: never."""
    max_turns: int
    """`env.max_turns`; the summary is one of them."""
    request: str = REQUEST

    def check(self, renderer: Renderer, max_tokens: int, max_new_tokens: int, of: str = "env") -> None:
        """Raises ConfigError if a row that has reached `from_tokens` has no room for the request and a summary. `of`:
        where `max_tokens` stands in the configuration."""
        if math.isinf(self.from_tokens):
            return
        needed = len(renderer.render_initial([{"role": "user", "content": self.request}], [])) + max_new_tokens
        if (left := max_tokens - math.ceil(self.from_tokens)) < needed:
            raise ConfigError(
                f"env.compact leaves {left} of {of}.max_tokens = {max_tokens} tokens, but the request and a summary of "
                f"max_new_tokens = {max_new_tokens} may need {needed}: lower env.compact or max_new_tokens, or give a "
                "shorter env.compact_request."
            )

    def due(self, tokens: int, turns: int) -> bool:
        """Whether a row of `tokens` tokens ends with a summary after `turns` turns: not where the summary would leave
        no turn to use it.

        >>> [Compaction(100, 4).due(tokens, turns) for tokens, turns in [(99, 1), (100, 1), (100, 2), (100, 3)]]
        [False, True, True, False]
        """
        return tokens >= self.from_tokens and turns + 2 <= self.max_turns

    def asking(self, messages: Sequence[Message]) -> list[Message]:
        """The environment's `messages`, followed by the request."""
        return [*messages, {"role": "user", "content": self.request}]

    def summed_up(self, first: Sequence[Message], summary: Message) -> list[Message]:
        """The conversation that goes on from `summary`; `first`: the environment's first messages."""
        text = summary.get("content") or ""
        return [*first, {"role": "assistant", "content": text}, {"role": "user", "content": GO_ON}]
