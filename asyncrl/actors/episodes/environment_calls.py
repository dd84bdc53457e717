"""Calls to an environment: each has a deadline, a failure costs this episode only, and rewards are added up."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.actors.envs.protocol import Env, EnvFailed, Message, Task, Turn
from asyncrl.redaction import redact

log = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeFailed(Exception):
    """The episode has no trajectory. `reason`: env_error, endpoint, or aborted (lease revoked, actor stops)."""

    def __init__(self, reason: str, detail: str) -> None:
        # An error may quote the policy, including half a surrogate pair, which no message can carry.
        detail = redact(detail.encode(errors="replace").decode())
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@contextmanager
def template_errors(what: str) -> Iterator[None]:
    """Raises EpisodeFailed for any exception: a chat template may raise anything on the messages of an environment."""
    try:
        yield
    except Exception as error:
        raise EpisodeFailed("env_error", f"{what}: {type(error).__name__}: {error}") from error


class GuardedEnv:
    """An environment whose calls raise EpisodeFailed only; `close` raises nothing."""

    def __init__(self, make: Callable[[], Env], call_s: float, called: Callable[[], None] = lambda: None) -> None:
        """`call_s`: deadline of one call. `called` is called after each."""
        self.reward = 0.0
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self._call_s, self._called = call_s, called
        try:
            self._env = make()
        except Exception as error:
            raise EpisodeFailed("env_error", f"environment: its constructor: {_described(error)}") from error

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form. Final once `reset` has returned."""
        try:
            return [tool.schema for tool in self._env.tools]
        except Exception as error:
            raise EpisodeFailed("env_error", f"environment.tools, expected Tools: {_described(error)}") from error

    async def reset(self, task: Task) -> list[Message]:
        return _checked(await self._call(lambda: self._env.reset(task), "reset"), "reset")

    async def step(self, message: Message) -> Turn:
        turn = await self._call(lambda: self._env.step(message), "step")
        try:
            numbers = [turn.reward, *turn.rewards.values(), *turn.metrics.values()]
            finite = all(math.isfinite(n) for n in numbers)
            for name in (*turn.rewards, *turn.metrics):
                name.encode()
        except (AttributeError, TypeError, UnicodeEncodeError) as error:
            raise EpisodeFailed(
                "env_error", f"environment.step returned {turn!r:.300}; expected a Turn of numbers, by name ({error})"
            ) from error
        if not finite:
            raise EpisodeFailed("env_error", f"environment.step returned a number that is not finite: {turn}")
        _checked(turn.messages or (), "step")
        self.reward += float(turn.reward)
        for name, value in turn.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
        self.metrics.update({name: float(value) for name, value in turn.metrics.items()})
        return turn

    async def close(self) -> None:
        """Close the environment. A failure does not change the episode's outcome."""
        try:
            await _within(self._env.close, self._call_s)
        except Exception as error:
            log.warning("environment.close: %s", _described(error))

    async def _call(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        try:
            return await _within(call, self._call_s)
        except TimeoutError as error:
            limit = f"did not return within {self._call_s} s (env.call_s)" if not str(error) else str(error)
            raise EpisodeFailed("env_error", f"environment.{name} {limit}") from error
        except Exception as error:
            raise EpisodeFailed("env_error", f"environment.{name}: {_described(error)}") from error
        finally:
            self._called()


async def contained(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`. Raises EnvFailed in place of SystemExit, which would end the event loop."""
    try:
        return await call()
    except SystemExit as error:
        raise EnvFailed(f"it called sys.exit({error.code!r})") from error


async def _within(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """The result of `call`. Raises TimeoutError after `seconds`, even if the call cannot be cancelled."""
    task = asyncio.ensure_future(contained(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TimeoutError
    if task.cancelled():
        raise EnvFailed("it raised CancelledError, although nothing had cancelled it")
    return task.result()


def _checked(messages: Any, name: str) -> list[Message]:
    """`messages` as a list. Raises EpisodeFailed unless each has a role; the renderer may still refuse them."""
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        raise EpisodeFailed(
            "env_error", f'environment.{name} gave {messages!r:.300}; expected messages, each {{"role", "content"}}'
        )
    return list(messages)


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, EnvFailed) else f"{type(error).__name__}: {error}"
