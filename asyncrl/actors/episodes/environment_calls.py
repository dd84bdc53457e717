"""Calls to an environment: each has a deadline, a failure costs this episode only, and rewards are added up."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.actors.envs.protocol import Env, EnvFailed, Message, Task, Turn
from asyncrl.user_errors import Cause, UserError, user_error

log = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeFailed(Exception):
    """The episode has no trajectory. `reason`: env_error, endpoint, or aborted (lease revoked, actor stops)."""

    def __init__(self, reason: str, detail: str, cause: Cause | None = None) -> None:
        """`cause` None: of an `env_error`, its text."""
        # An error may quote the policy, including half a surrogate pair, which no message can carry.
        detail = detail.encode(errors="replace").decode()
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
        self.cause = Cause(detail) if cause is None and reason == "env_error" else cause


def failed(what: str, error: BaseException) -> EpisodeFailed:
    """The failure of an episode by an exception of the user's code, raised in `what`."""
    described = _described(error)
    return EpisodeFailed("env_error", f"{what}: {described.text}", described.cause)


@contextmanager
def template_errors(what: str) -> Iterator[None]:
    """Raises EpisodeFailed for any exception: a chat template may raise anything on the messages of an environment."""
    try:
        yield
    except Exception as error:
        detail = f"{what}: {type(error).__name__}: {error}"
        raise EpisodeFailed("env_error", detail, Cause(f"{what}: {type(error).__name__}")) from error


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
            raise failed("environment: its constructor", error) from error

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form. Final once `reset` has returned."""
        try:
            tools = list(self._env.tools)
            if plain := [tool for tool in tools if not hasattr(tool, "schema")]:
                raise EnvFailed(f"it holds {plain[0]!r}; make it one with Tool.from_function")
            return [tool.schema for tool in tools]
        except Exception as error:
            raise failed("environment.tools, expected Tools", error) from error

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
            wrong = f"environment.step returned {turn!r:.300}; expected a Turn of numbers, by name ({error})"
            raise EpisodeFailed("env_error", wrong, Cause("environment.step: no Turn")) from error
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
            log.warning("environment.close: %s", _described(error).text)

    async def _call(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        try:
            return await _within(call, self._call_s)
        except TimeoutError as error:
            limit = f"did not return within {self._call_s} s (env.call_s)" if not str(error) else str(error)
            raise EpisodeFailed("env_error", f"environment.{name} {limit}", Cause(name, outage=True)) from error
        except Exception as error:
            raise failed(f"environment.{name}", error) from error
        finally:
            self._called()


async def contained(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`. Raises EnvFailed in place of SystemExit, which would end the event loop, and for a plain
    function."""
    try:
        awaitable = call()
        if not inspect.isawaitable(awaitable):
            raise EnvFailed(f"it is a plain function, which returned {awaitable!r:.100}; write `async def`")
        return await awaitable
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
        wrong = f'environment.{name} gave {messages!r:.300}; expected messages, each {{"role", "content"}}'
        raise EpisodeFailed("env_error", wrong, Cause(f"environment.{name}: no messages"))
    return list(messages)


def _described(error: BaseException) -> UserError:
    if isinstance(error, EnvFailed):
        return UserError(str(error), error.cause or user_error(error).cause)
    return user_error(error)
