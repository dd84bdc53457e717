"""Texts of any length: checked before they are tokenised, rendered off the event loop, with a deadline."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.envs.tool import Tool
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from tests.actors.episodes.playing import LIMITS, run, saying
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, tool_says


@pytest.mark.parametrize("method", ["render_initial", "render_tail", "parse"])
def test_a_renderer_may_raise_anything_over_what_was_said(method: str) -> None:
    class Refuses(FakeRenderer):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError("Can only get item pairs from a mapping.")

    setattr(Refuses, method, refuse)
    with pytest.raises(EpisodeFailed, match="TypeError: Can only get item pairs") as caught:
        run(FakeEnv([tool_says("1")]), saying("a"), renderer=Refuses())
    assert caught.value.reason == "env_error"


def test_a_prompt_that_no_row_can_hold_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(EpisodeFailed, match="task5: the conversation has more than 262144 characters") as caught:
        run(FakeEnv([], prompt="x" * (15 << 20)), saying("a"), renderer=Unable())
    assert caught.value.reason == "env_error"


def test_an_observation_that_no_row_can_hold_ends_the_episode_before_it_is_tokenised() -> None:
    class UntilThen(Unable):
        render_initial = FakeRenderer.render_initial

    env = FakeEnv([replace(tool_says("x" * (100 << 20)), reward=0.5), Turn(reward=5.0)])
    t = run(env, saying("a"), renderer=UntilThen())
    assert (t.stop_reason, t.turns, t.reward) == ("max_tokens", 1, 0.5)


class Unable(FakeRenderer):
    def render_initial(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it was asked to tokenise what is too long")

    render_tail = render_initial


class Noting(FakeRenderer):
    """Notes the thread of each rendering."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def render_initial(self, *arguments: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().render_initial(*arguments)

    def render_tail(self, *arguments: Any, **how: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().render_tail(*arguments, **how)


@pytest.mark.parametrize("chars", [5_000, 100_000])
def test_long_texts_are_rendered_off_the_loop_and_to_the_same_ids(chars: int) -> None:
    limits, renderer = replace(LIMITS, max_tokens=10**6), Noting()
    engine = FakeEngine(lambda *_: [ord("a"), STOP], 10**6)
    t = run(FakeEnv([tool_says("y" * chars), Turn(done=True)], prompt="x" * chars), engine, limits, renderer=renderer)
    text = "".join(chr(i) if i else "$" for i in t.rows[0].token_ids)
    assert text == f"<system>{'x' * chars}>a$<tool>{'y' * chars}>a$"
    assert {thread == threading.get_ident() for thread in renderer.threads} == {chars < 20_000}


@pytest.mark.parametrize("chars", [5_000, 100_000])
def test_long_schemas_of_tools_are_rendered_off_the_loop_at_every_turn(chars: int) -> None:
    env, renderer = FakeEnv([tool_says("y"), tool_says("y"), Turn(done=True)]), Noting()
    env.tools = (Tool("f", {"type": "function", "function": {"name": "f", "description": "z" * chars}}, len),)
    run(env, FakeEngine(lambda *_: [ord("a"), STOP]), renderer=renderer)
    assert len(renderer.threads) >= 2
    assert {thread == threading.get_ident() for thread in renderer.threads} == {chars < 20_000}


def test_a_text_that_is_not_rendered_in_time_fails_its_episode() -> None:
    class Slow(FakeRenderer):
        def render_initial(self, *_: Any) -> list[int]:
            over.wait(20)
            return []

    over = threading.Event()
    threading.Timer(2.0, over.set).start()
    with pytest.raises(EpisodeFailed, match=r"not rendered within 0.5 s \(env.call_s\)") as caught:
        run(FakeEnv([], prompt="x" * 200_000), saying("a"), renderer=Slow())
    assert caught.value.reason == "env_error"
