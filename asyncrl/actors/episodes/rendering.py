"""Renders conversations without stopping the event loop, however long what an environment or an agent said is.

conversation ──short──> rendered at once
             ──long───> a thread: more characters than the row has room for? ──no──> rendered, within the deadline
                                  └──yes──> PromptTooLong, before anything is tokenised
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from asyncrl.actors.engines.protocol import PromptTooLong
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, failing
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.data.base import Message
from asyncrl.rendering.template import Renderer

T = TypeVar("T")

SHORT_CHARS = 20_000
"""Up to here rendering and tokenising takes a few milliseconds, and is not worth a thread."""
LEAST_CHARS = 1 << 18
"""As much is always tokenised, since a template may leave out a part of what was said."""
_AT_ONCE = threading.Semaphore(4)
"""Threads of one process that render: a tokenizer takes hundreds of bytes per character."""


class OffLoop:
    """Runs what renders long conversations in a thread."""

    def __init__(self, renderer: Renderer, limits: EpisodeLimits) -> None:
        # A renderer of the user's need not tell its longest token; no tokenizer that we know of has a longer one.
        longest_token = int(getattr(renderer, "longest_token", 256))
        self._limits, self._most = limits, max(LEAST_CHARS, limits.max_tokens * longest_token)

    async def run(self, said: Any, call: Callable[[], T]) -> T:
        """The result of `call`, which renders `said`. Raises what it raises, PromptTooLong if `said` cannot have room,
        and TimeoutError, naming `env.call_s`; the thread then ends on its own, its result unused."""
        if not is_longer(said, SHORT_CHARS):
            return call()

        def checked() -> T:
            if is_longer(said, self._most):
                raise PromptTooLong(
                    f"the conversation has more than {self._most} characters, env.max_tokens is "
                    f"{self._limits.max_tokens}"
                )
            with _AT_ONCE:
                if abandoned.is_set():
                    raise TimeoutError
                return call()

        abandoned = threading.Event()
        deadline = asyncio.timeout(self._limits.call_s)
        try:
            async with deadline:
                return await asyncio.to_thread(checked)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            late = f"it was not rendered within {self._limits.call_s:g} s (env.call_s): say less at once"
            raise TimeoutError(late) from error
        finally:
            abandoned.set()


class Rendering:
    """The renderer of one episode, for its coroutine. Its methods raise EpisodeFailed for whatever the chat template
    raises on the messages of an environment, and PromptTooLong."""

    def __init__(self, renderer: Renderer, limits: EpisodeLimits) -> None:
        self._renderer, self._off_loop = renderer, OffLoop(renderer, limits)
        self._tools: Sequence[Any] = ()
        self._long_tools = False

    async def initial(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return await self._run(
            "the chat template refuses the conversation",
            (messages, self._counted(tools)),
            lambda: self._renderer.render_initial(messages, tools),
        )

    async def tail(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Any], row: OpenRow, *, closed: bool
    ) -> list[int] | None:
        return await self._run(
            "the chat template refuses the messages of step",
            (before, new, self._counted(tools)),
            lambda: self._renderer.render_tail(
                before, new, tools, closed=closed, row=row.ids, sampled=row.last_sampled
            ),
        )

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        with failing("the renderer cannot parse what the policy sampled"):
            return self._renderer.parse(sampled_ids)

    def _counted(self, tools: Sequence[Any]) -> Sequence[Any]:
        """The tools if they are long; their schemas stay the same, so they are measured once and not at every turn."""
        if tools is not self._tools:
            self._tools, self._long_tools = tools, is_longer(tools, SHORT_CHARS)
        return tools if self._long_tools else ()

    async def _run(self, what: str, said: Any, call: Callable[[], T]) -> T:
        def guarded() -> T:
            with failing(what):
                return call()

        try:
            return await self._off_loop.run(said, guarded)
        except TimeoutError as error:
            raise EpisodeFailed("env_error", f"{what}: {error}") from error


def is_longer(said: Any, most: int) -> bool:
    """Whether the texts in `said`, with one character for each other thing, have more than `most` characters. Stops as
    soon as they do.

    >>> is_longer([{"content": "x" * 10}], 17), is_longer([{"content": "x" * 10}], 20)
    (True, False)
    """
    rest, left = [said], most
    while rest and left >= 0:
        part = rest.pop()
        left -= len(part) if isinstance(part, str) else 1
        if isinstance(part, dict):
            rest += part.keys()
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part
    return left < 0
