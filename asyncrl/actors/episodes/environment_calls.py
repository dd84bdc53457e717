"""Calls to an environment: each has a deadline, a failure costs this episode only, and rewards are added up."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import reprlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from asyncrl.actors.envs.protocol import Env, EnvFailed, Message, Task, Turn
from asyncrl.actors.envs.resuming import Way, checked_snapshot, told, way_of
from asyncrl.actors.episodes.turn_rewards import Earnings
from asyncrl.redaction import redact
from asyncrl.trajectory.turns import Snapshot
from asyncrl.user_errors import Cause, UserError, sendable, user_error

log = logging.getLogger(__name__)
T = TypeVar("T")

_DETAIL_CHARS = 4000
"""Longest detail of a failure, which goes into logs and to the buffer. An error may quote a whole observation."""


class EpisodeFailed(Exception):
    """The episode has no trajectory. `reason`: env_error, env_diverged, group_score, endpoint, or aborted (lease
    revoked, actor stops)."""

    def __init__(self, reason: str, detail: str, cause: Cause | None = None) -> None:
        """`cause` None: of an `env_error`, its text."""
        # An error may quote the policy, including half a surrogate pair.
        detail = sendable(redact(detail)[:_DETAIL_CHARS])
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
        self.cause = Cause(detail) if cause is None and reason == "env_error" else cause


def failed(what: str, error: BaseException) -> EpisodeFailed:
    """The failure of an episode by an exception of the user's code, raised in `what`."""
    described = _described(error)
    return EpisodeFailed("env_error", f"{what}: {described.text}", described.cause)


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Raises EpisodeFailed for whatever is raised inside, where foreign code runs and nothing is awaited: constructors,
    a property, a chat template. Even KeyboardInterrupt is then the code's own, since an actor handles signals."""
    try:
        yield
    except EpisodeFailed:
        raise
    except BaseException as error:
        raise failed(what, error) from error


class GuardedEnv:
    """An environment whose calls raise EpisodeFailed only; `close` raises nothing."""

    def __init__(
        self,
        make: Callable[[], Env],
        call_s: float,
        max_reward: float,
        called: Callable[[], None] = lambda: None,
        tool_called: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        """`call_s`: deadline of one call. `max_reward`: largest size of a reward. `called` is called after each.
        `tool_called`: takes the name of each tool that a step called, and its seconds."""
        self.reward = 0.0
        self.rewards: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.feedback = ""
        """The text of its last messages."""
        self.earned = Earnings()
        self.reset_state: str | bytes | None = None
        """That `reset` left."""
        self._call_s, self._max_reward, self._called, self._tool_called = call_s, max_reward, called, tool_called
        with failing("environment: its constructor"):
            self._env = make()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form. Final once `reset` has returned."""
        with failing("environment.tools, expected Tools"):
            tools = list(self._env.tools)
            if plain := [tool for tool in tools if not hasattr(tool, "schema")]:
                raise EnvFailed(f"it holds {plain[0]!r}; make it one with Tool.from_function")
            return [tool.schema for tool in tools]

    @property
    def way(self) -> Way:
        """How an episode that was interrupted goes on. Final once `reset` has returned."""
        with failing("environment"):
            return way_of(self._env)

    async def reset(self, task: Task, interrupted: Message | None = None) -> list[Message]:
        """`interrupted`: the action that an earlier attempt was interrupted in, for an environment that is told."""
        with failing("environment.reset"):
            more: Any = told(self._env, interrupted)
        messages = await self._call(lambda: self._env.reset(task, **more), "reset")
        with failing("environment.reset, expected messages"):
            self.reset_state = getattr(self._env, "reset_state", None)
            self.earned.begin(self.reset_state)
            return _checked(messages, "reset")

    async def step(self, message: Message) -> Turn:
        turn = await self.step_again(message)
        with failing("environment.step, expected a Turn"):
            self.add(turn)
        return turn

    async def step_again(self, message: Message) -> Turn:
        """Like `step`, for an action whose answer was added already."""
        turn = await self._call(lambda: self._env.step(message), "step")
        with failing("environment.step, expected a Turn"):
            _check_numbers(turn)
            _checked(turn.messages or (), "step")
        return turn

    async def snapshot(self, most: int) -> Snapshot | None:
        """For an environment with the way `snapshot`. `most`: bytes."""
        env: Any = self._env
        state = await self._call(lambda: env.snapshot(), "snapshot")
        with failing("environment.snapshot"):
            return checked_snapshot(state, most)

    async def restore(self, state: Snapshot) -> None:
        """For an environment with the way `snapshot`, after its `reset`."""
        env: Any = self._env
        await self._call(lambda: env.restore(state), "restore")

    def add(self, turn: Turn, *, given: bool = False) -> None:
        """Add the rewards of a turn. Raises EpisodeFailed for a sum that is larger than any reward may be. `given`: by
        the recording, so that its tools are counted already."""
        self.reward += float(turn.reward)
        for name, value in turn.rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(value)
        for value in (self.reward, *self.rewards.values()):
            check_reward(value, "environment.step", self._max_reward)
        self.earned.add(turn.reward, turn.rewards, turn.state)
        self.feedback = _text(turn.messages)
        for name, seconds in () if given else turn.calls:
            self._tool_called(name, float(seconds))
        self.metrics.update({name: float(value) for name, value in turn.metrics.items()})

    async def close(self) -> None:
        """Close the environment. A failure does not change the episode's outcome."""
        try:
            await _within(self._env.close, self._call_s)
        except Exception as error:
            log.warning("environment.close: %s", _described(error).text[:_DETAIL_CHARS])

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
    """The result of `call`. Raises EnvFailed for a plain function, and in place of what is no Exception: SystemExit and
    KeyboardInterrupt would end the event loop, and others every episode that awaits the call."""
    try:
        awaitable = call()
        if not inspect.isawaitable(awaitable):
            raise EnvFailed(f"it is a plain function, which returned {_SHORT.repr(awaitable)}; write `async def`")
        return await awaitable
    except (Exception, asyncio.CancelledError):
        raise
    except SystemExit as error:
        raise EnvFailed(f"it called sys.exit({error.code!r})") from error
    except BaseException as error:
        described = _described(error)
        raise EnvFailed(f"it raised {described.text}", described.cause) from error


def check_reward(value: float, whose: str, max_reward: float) -> None:
    """Raises EpisodeFailed for a reward that is not finite, or larger than `max_reward`: the learner squares rewards in
    float32, and one of 1e300 would be refused there with its whole batch."""
    if not -max_reward <= value <= max_reward:
        raise EpisodeFailed(
            "env_error",
            f"{whose}: a reward of {value:g}, and env.max_reward is {max_reward:g}: correct the reward, or raise "
            "env.max_reward",
        )


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


def _check_numbers(turn: Any) -> None:
    try:
        numbers = [turn.reward, *turn.rewards.values(), *turn.metrics.values(), *(s for _, s in turn.calls)]
        finite = all(math.isfinite(n) for n in numbers)
        for name in (*turn.rewards, *turn.metrics, *(name for name, _ in turn.calls)):
            name.encode()
    except (AttributeError, TypeError, ValueError, UnicodeEncodeError) as error:
        wrong = f"environment.step returned {_shown(turn)}; expected a Turn of numbers, by name ({error})"
        raise EpisodeFailed("env_error", wrong, Cause("environment.step: no Turn")) from error
    if not finite:
        raise EpisodeFailed("env_error", f"environment.step returned a number that is not finite: {_shown(turn)}")


def _shown(given: Any) -> str:
    """`given` in at most 300 characters. The messages of a Turn, which may be long, come last and are cut first."""
    if isinstance(given, Turn):
        given = {name: getattr(given, name) for name in ("reward", "rewards", "metrics", "done")}
        return f"Turn({', '.join(f'{name}={_SHORT.repr(value)}' for name, value in given.items())})"[:300]
    return _SHORT.repr(given)[:300]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def _checked(messages: Any, name: str) -> list[Message]:
    """`messages` as a list. Raises EpisodeFailed unless each has a role; the renderer may still refuse them."""
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        wrong = f'environment.{name} gave {_shown(messages)}; expected messages, each {{"role", "content"}}'
        raise EpisodeFailed("env_error", wrong, Cause(f"environment.{name}: no messages"))
    return list(messages)


def _described(error: BaseException) -> UserError:
    described = user_error(error)
    if isinstance(error, EnvFailed):
        return UserError(str(error), error.cause or described.cause)
    return described


def _text(messages: Sequence[Message]) -> str:
    texts = (message.get("content") for message in messages)
    return "\n".join(text for text in texts if isinstance(text, str) and text)
