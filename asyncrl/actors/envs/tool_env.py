"""An environment with tools: it executes calls until the assistant answers without one, and scores that answer."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgpack

from asyncrl.actors.envs.protocol import Environment, Message, Task, Tool, Turn
from asyncrl.actors.envs.resuming import Way, takes_interrupted
from asyncrl.actors.envs.single_turn import check_score
from asyncrl.actors.envs.tool import ToolError
from asyncrl.data.base import prompt_messages
from asyncrl.plugins import resolve
from asyncrl.rendering.tool_calls import arguments_of
from asyncrl.rewards import Score, Scored, ScoreSpec, build, run_score

ToolLike = Tool | Callable[..., Any] | str
"""A tool, a function with type hints and a docstring, or the import path of either."""


class ToolEnvironment(Environment):
    """Executes an assistant message's tool calls concurrently and scores the first message without calls.

    Errors of the policy (an unknown tool, arguments that do not fit, a ToolError) are returned to it as a tool message.
    Failures of a tool (any other exception, no answer within `tool_timeout_s`) end the episode as `env_error`: an
    outage must not teach the policy that its call was bad.
    """

    state_fields: ClassVar[tuple[str, ...] | None] = None
    """Attributes of a subclass that hold what it keeps between turns, as plain data; `()`: it keeps nothing. An
    interrupted episode then goes on with them (`buffer.turns`). None, or not set by the class itself: it is not known,
    and the episode begins again."""

    def __init__(
        self,
        tools: Sequence[ToolLike] = (),
        score: ScoreSpec | None = None,
        *,
        max_turns: int | None = None,
        tool_timeout_s: float = 30.0,
        max_tool_chars: int = 4000,
        turn_score: ScoreSpec | None = None,
    ) -> None:
        """
        Args:
            tools: the tools of the policy.
            score: a name, an import path, or several with weights (docs/how-to/rewards.md). It scores the last
                message's text.
            turn_score: the same for each message before it, text and calls: a reward of its turn, e.g. from a judge.
            max_turns: number of assistant messages, if fewer than `env.max_turns`. The last message that both limits
                allow is scored even if it calls tools (metric `max_turns` is 1).
            tool_timeout_s: deadline of one call.
            max_tool_chars: a longer result is cut, with a note.
        """
        self.tools: Sequence[Tool] = tuple(as_tool(tool) for tool in tools)
        self._score: Score | None = None if score is None else build(score, "env.options.score")
        self._turn_score: Score | None = None
        if turn_score is not None:
            self._turn_score = build(turn_score, "env.options.turn_score")
        self._max_turns = max_turns
        self._tool_timeout_s = tool_timeout_s
        self._max_tool_chars = max_tool_chars
        self._turns = 0
        self._called: list[tuple[str, float]] = []
        self.task: Task = {}
        self.tokens: int | None = None
        """Number of tokens sampled for the current assistant message."""

    @staticmethod
    def check(options: Mapping[str, Any]) -> None:
        """Check the tools and the score before anything runs. Raises ValueError."""
        check_score(options)
        for tool in options.get("tools", ()):
            try:
                as_tool(tool)
            except (TypeError, NameError) as error:
                raise ValueError(f"env.options.tools: {error}") from error

    async def reset(self, task: Task) -> list[Message]:
        self.task = task
        return prompt_messages(task)

    @property
    def resumed_by(self) -> Way:
        """Functions that are tools keep nothing for an episode, so that this class itself has a snapshot."""
        cls = type(self)
        if (
            cls is ToolEnvironment
            or vars(cls).get("state_fields") is not None
            or cls.snapshot is not ToolEnvironment.snapshot
        ):
            return "snapshot"
        return "replay" if self.replayable else "told" if takes_interrupted(self) else "none"

    async def snapshot(self) -> bytes | str | None:
        """The number of turns and the `state_fields`. Raises TypeError for one that is no plain data."""
        kept = {name: getattr(self, name) for name in self.state_fields or ()}
        packed: bytes = msgpack.packb([self._turns, kept])
        return packed

    async def restore(self, state: Any) -> None:
        """`state`: what `snapshot` returned."""
        self._turns, kept = msgpack.unpackb(state, strict_map_key=False)
        for name in self.state_fields or ():
            setattr(self, name, kept[name])

    async def step(self, message: Message) -> Turn:
        self._turns += 1
        self.tokens = message.get("tokens")
        calls = message.get("tool_calls") or []
        last = message.get("last", False) or self._turns == self._max_turns
        if calls and not last:
            return await self._answered(message, calls)
        scored = await self.score(message.get("content") or "")
        if isinstance(scored, tuple):
            scored = Scored(*scored)
        metrics = {"turns": float(self._turns), "max_turns": float(bool(calls)), **scored.metrics}
        rewards = dict(scored.parts) or {"score": scored.value}
        return Turn(reward=scored.value, done=True, metrics=metrics, rewards=rewards)

    async def _answered(self, message: Message, calls: Sequence[Mapping[str, Any]]) -> Turn:
        """The results of a message's calls, and what the message earns."""
        results = await self._execute(calls)
        called, self._called = self._called, []
        if self._turn_score is None:
            return Turn(messages=results, calls=called)
        scored = await run_score(self._turn_score, self.task, _said(message), self.tokens)
        parts = dict(scored.parts) or {"turn": scored.value}
        return Turn(messages=results, reward=scored.value, metrics=dict(scored.metrics), rewards=parts, calls=called)

    async def score(self, solution: str) -> Scored | tuple[float, dict[str, float]]:
        """(reward, metrics) of the final text; override this for another criterion of success."""
        if self._score is None:
            raise TypeError(
                "env.options.score is not set; give a name or an import path, or override ToolEnvironment.score"
            )
        return await run_score(self._score, self.task, solution, self.tokens)

    async def _execute(self, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        if len(calls) == 1:
            return [await self._answer(calls[0])]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(self._answer(call)) for call in calls]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answer.result() for answer in answers]

    async def _answer(self, call: Mapping[str, Any]) -> Message:
        name = call["function"].get("name", "")
        try:
            text = await self._call(name, arguments_of(call))
        except ToolError as error:
            text = f"error: {error}"
        content = cut(text, self._max_tool_chars)
        return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}

    async def _call(self, name: str, arguments: dict[str, Any] | None) -> str:
        if arguments is None:
            raise ToolError("the call is not valid JSON")
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            raise ToolError(f"no tool {name!r}; there are: {', '.join(tool.name for tool in self.tools)}")
        deadline, began = asyncio.timeout(self._tool_timeout_s), time.monotonic()
        try:
            async with deadline:
                return await tool(arguments)
        except SystemExit as error:  # raised in a task of a group, it would end the event loop
            raise RuntimeError(f"tool {name} called sys.exit({error.code!r})") from error
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"tool {name} did not answer within {self._tool_timeout_s} s (env.options.tool_timeout_s)"
            ) from error
        finally:
            self._called.append((name, time.monotonic() - began))


def _said(message: Message) -> str:
    """The text of a message, and each of its calls in a line of JSON."""
    calls = [
        json.dumps({"name": call["function"].get("name", ""), "arguments": arguments_of(call)})
        for call in message.get("tool_calls") or []
    ]
    return "\n".join(part for part in (message.get("content") or "", *calls) if part)


def cut(text: str, max_chars: int) -> str:
    """At most `max_chars` characters of `text`, with a note about how many were cut.

    >>> cut("12345", 3)
    '123\\n[cut: 2 more characters]'
    """
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: {len(text) - max_chars} more characters]"


def as_tool(tool: ToolLike) -> Tool:
    """A Tool from a Tool, a function, or the import path of either."""
    made: Any = resolve(tool, None, "env.options.tools") if isinstance(tool, str) else tool
    return made if isinstance(made, Tool) else Tool.from_function(made)


def __getattr__(name: str) -> Any:
    """ToolEnv, the old name of ToolEnvironment, kept for one release."""
    if name == "ToolEnv":
        warnings.warn("ToolEnv is now ToolEnvironment: rename it", DeprecationWarning, stacklevel=2)
        return ToolEnvironment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
