"""Whatever an environment raises or returns costs its episode only, with the reason in its words."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Env, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from tests.actors.episodes.playing import LIMITS, run, saying
from tests.actors.fakes import FakeEnv, tool_says


class Raises(FakeEnv):
    async def reset(self, task: Any) -> Any:
        raise KeyError("prompt")


class Stuck(FakeEnv):
    async def step(self, message: Any) -> Turn:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if self.closed:
                    raise


def refuses() -> Env:
    raise OSError("no licence")


class Plain(FakeEnv):
    """As users write it who forget `async`, or what to return."""

    def __init__(self, method: str, does: Callable[[], Any]) -> None:
        super().__init__([])
        setattr(self, method, lambda _: does())


class Functions(FakeEnv):
    tools: Any = (len,)


def later(value: Any) -> Any:
    async def say() -> Any:
        return value

    return say()


async def cancelled() -> None:
    raise asyncio.CancelledError


def raising(error: BaseException) -> Callable[[], Any]:
    async def fails() -> Any:
        raise error

    return fails


def plainly(error: BaseException) -> Any:
    raise error


class Abrupt(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Evil:
    """As the answer of a step: whatever is read of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise GeneratorExit

    def __repr__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("env", "detail"),
    [
        (Raises([]), "environment.reset: KeyError: 'prompt'"),
        (FakeEnv([ValueError("boom")]), "environment.step: ValueError: boom"),
        (FakeEnv([TimeoutError("tool f did not answer")]), "tool f did not answer"),
        (FakeEnv([Turn()]), "no messages"),
        (FakeEnv([Turn(reward=math.nan, done=True)]), "not finite"),
        (Stuck([]), r"did not return within 0.5 s \(env.call_s\)"),
        (FakeEnv([], prompt="x" * 500), "task5: prompt has"),
        (refuses, "OSError: no licence"),
        (Plain("reset", lambda: {}["prompt"]), "environment.reset: KeyError: 'prompt'"),
        (Plain("reset", lambda: later(None)), "environment.reset gave None; expected messages"),
        (Plain("step", lambda: Turn(done=True)), "environment.step: it is a plain function"),
        (Plain("step", lambda: later(None)), "environment.step returned None; expected a Turn"),
        (Plain("step", lambda: later(Turn(reward="1", done=True))), "reward='1'.*expected a Turn of numbers"),  # type: ignore[arg-type]
        (Plain("step", lambda: later(Turn(messages=["Hi"]))), r"environment.step gave \['Hi'\]; expected messages"),  # type: ignore[list-item]
        (Plain("step", lambda: later(Turn(done=True, metrics={3: 1.0}))), "expected a Turn of numbers, by name"),  # type: ignore[dict-item]
        (Plain("step", lambda: later(Turn(done=True, rewards={"\ud800": 1.0}))), "surrogates not allowed"),
        (FakeEnv([ValueError("no tool \ud800")]), r"environment.step: ValueError: no tool \?"),
        (Plain("step", cancelled), "it raised CancelledError"),
        (Plain("step", lambda: sys.exit(3)), r"it called sys.exit\(3\)"),
        (Functions([]), "environment.tools, expected Tools"),
        (Plain("step", raising(KeyboardInterrupt())), "environment.step: it raised KeyboardInterrupt"),
        (Plain("step", lambda: plainly(KeyboardInterrupt())), "environment.step: it raised KeyboardInterrupt"),
        (Plain("reset", raising(GeneratorExit())), "environment.reset: it raised GeneratorExit"),
        (Plain("step", raising(BaseException("out"))), "environment.step: it raised BaseException: out"),
        (Plain("step", raising(Abrupt())), "environment.step: it raised Abrupt"),
        (Plain("step", lambda: asyncio.to_thread(plainly, GeneratorExit())), "GeneratorExit"),
        (lambda: plainly(KeyboardInterrupt()), "environment: its constructor: KeyboardInterrupt"),
        (lambda: plainly(asyncio.CancelledError()), "environment: its constructor: CancelledError"),
        (Plain("step", lambda: later(Evil())), "environment.step, expected a Turn: GeneratorExit"),
        (Plain("step", lambda: later(Turn(done=True, messages=Evil()))), "environment.step"),  # type: ignore[arg-type]
        (Plain("step", lambda: later(Turn(done=True, reward=10**400))), "environment.step.*OverflowError"),
        (Plain("step", lambda: later(Turn(done=True, reward=1e300))), "env.max_reward"),
        (Plain("step", lambda: later(Turn(done=True, reward=-2e6))), r"-2e\+06.*env.max_reward is 1e\+06"),
        (Plain("step", lambda: later(Turn(done=True, rewards={"part": 2e6}))), "env.max_reward"),
        (FakeEnv([replace(tool_says("1"), reward=6e5), Turn(reward=6e5, done=True)]), r"1\.2e\+06.*env.max_reward"),
    ],
)
def test_what_goes_wrong_in_the_environment_fails_the_episode(env: Any, detail: str) -> None:
    with pytest.raises(EpisodeFailed, match=detail) as caught:
        run(env, saying("a", "b"))
    assert caught.value.reason == "env_error"
    if isinstance(env, FakeEnv):
        assert env.closed == 1


def test_the_reward_may_be_as_large_as_the_limit_says() -> None:
    assert run(FakeEnv([Turn(reward=-1e6, done=True)]), saying("a")).reward == -1e6
    limits = replace(LIMITS, max_reward=5e6)
    assert run(FakeEnv([Turn(reward=4e6, done=True)]), saying("a"), limits).reward == 4e6


def test_what_an_environment_says_of_its_failure_is_cut() -> None:
    with pytest.raises(EpisodeFailed) as caught:
        run(FakeEnv([ValueError("x" * 10**7)]), saying("a"))
    assert len(caught.value.detail) < 10_000


@pytest.mark.parametrize("close", [KeyboardInterrupt(), GeneratorExit(), Abrupt(), asyncio.CancelledError()])
def test_whatever_close_raises_costs_nothing(close: BaseException) -> None:
    class Leaving(FakeEnv):
        async def close(self) -> None:
            raise close

    assert run(Leaving([Turn(done=True)]), saying("a")).stop_reason == "done"


def test_a_failure_to_close_costs_nothing() -> None:
    class Clingy(FakeEnv):
        async def close(self) -> None:
            raise OSError("still busy")

    assert run(Clingy([Turn(reward=2.0, done=True)]), saying("a")).reward == 2.0
