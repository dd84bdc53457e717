from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actors.engines.protocol import Generation
from asyncrl.actors.envs.protocol import Env, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.trajectory import CONTEXT, Trajectory, TurnRecord
from asyncrl.wire import decode_trajectory, encode_trajectory
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, FakeRenderer, ticket, tool_says

LIMITS = EpisodeLimits(max_turns=4, max_tokens=200, max_new_tokens=10, call_s=0.5)


def run(env: Env | Callable[[], Env], engine: FakeEngine, limits: EpisodeLimits = LIMITS, **options: Any) -> Trajectory:
    make: Any = env if callable(env) else lambda: env

    async def episode() -> Trajectory:
        progress = Progress(0.0, clock=options.pop("clock", lambda: 0.0))
        begun, renderer = options.pop("ticket", ticket(2, group=5)), options.pop("renderer", FakeRenderer())
        result = await play(begun, make, engine, renderer, limits, progress)
        return result.trajectory(begun, progress, actor="actor-0", env_name="fake")

    return asyncio.run(asyncio.wait_for(episode(), 20))


def saying(*outputs: str) -> FakeEngine:
    """Each output ends with the stop token, unless it ends with `~`: then it is cut."""
    texts = iter(outputs)

    def script(request: str, prompt: Sequence[int], sampling: Any) -> list[int]:
        text = next(texts)
        ids = [ord(c) for c in text.rstrip("~")]
        return ids if text.endswith("~") else [*ids, STOP]

    return FakeEngine(script, LIMITS.max_tokens)


def test_the_environment_is_told_which_message_is_the_last() -> None:
    env = FakeEnv([tool_says("1")] * 4)
    assert run(env, saying("a", "b", "c", "d")).stop_reason == "max_turns"
    assert [m["last"] for m in env.heard] == [False, False, False, True]


def test_two_turns_become_one_row() -> None:
    env = FakeEnv([tool_says("42"), Turn(reward=1.0, done=True, rewards={"success": 1.0}, metrics={"turns": 2.0})])
    engine = saying("call", "42!")
    t = run(env, engine)
    assert [m["content"] for m in env.heard] == ["call", "42!"]
    assert env.task["episode"] == 2
    assert env.closed == 1
    (row,) = t.rows
    text = "".join(chr(i) if i else "$" for i in row.token_ids)
    assert text == "<system>Hello>call$<tool>42>42!$"
    assert "".join(c for c, m in zip(text, row.mask, strict=True) if m) == "call$42!$"
    np.testing.assert_allclose(row.logprobs[row.mask], -np.arange(9) / 1000)
    assert row.versions[row.mask].tolist() == [0] * 9
    assert set(row.versions[~row.mask]) == {CONTEXT}
    assert set(row.logprobs[~row.mask]) == {0.0}
    assert (t.reward, t.rewards, t.metrics) == (1.0, {"success": 1.0}, {"turns": 2.0})
    assert (t.turns, t.stop_reason, t.task_id, t.actor) == (2, "done", "task5", "actor-0")
    # The second turn's prompt is the first one's, what was sampled, and the tail: nothing was encoded again.
    assert engine.calls[1][1][: len(engine.calls[0][1]) + 5] == [*engine.calls[0][1], *map(ord, "call"), STOP]
    assert decode_trajectory([bytes(f) for f in encode_trajectory(t)]).digest() == t.digest()


def test_a_broken_prefix_starts_a_new_row() -> None:
    user = Turn(messages=[{"role": "user", "content": "more"}])
    t = run(FakeEnv([tool_says("1"), user, Turn(done=True)]), saying("a", "b", "c"))
    texts = ["".join(chr(i) if i else "$" for i in row.token_ids) for row in t.rows]
    assert texts == ["<system>Hello>a$<tool>1>b$", "<system>Hello<assistant>a<tool>1<assistant>b<user>more>c$"]
    assert [int(row.mask.sum()) for row in t.rows] == [4, 2]


def test_versions_are_those_of_each_turn() -> None:
    class Swapping(FakeEnv):
        async def step(self, message: Any) -> Turn:
            engine.held_version = (0, 3)
            return await super().step(message)

    engine = saying("a", "b")
    t = run(Swapping([tool_says("1"), Turn(done=True)]), engine)
    assert t.rows[0].versions[t.rows[0].mask].tolist() == [0, 0, 3, 3]
    assert (t.oldest_version, t.newest_version) == (0, 3)


@pytest.mark.parametrize(
    ("outputs", "turns", "expected", "count"),
    [
        (["a", "b", "c", "d"], [tool_says("1")] * 4, "max_turns", 4),
        (["0123456789~"], [Turn(done=True)], "length", 1),
        (["0123456789~", "a"], [tool_says("1"), Turn(done=True)], "done", 2),
        (["a"], [tool_says("x" * 300)], "max_tokens", 1),
        (["a", "0123456789~"], [tool_says("x" * 170), Turn(done=True)], "max_tokens", 2),
    ],
)
def test_every_limit_has_its_stop_reason(outputs: list[str], turns: list[Turn], expected: str, count: int) -> None:
    env = FakeEnv(turns)
    t = run(env, saying(*outputs))
    assert (t.stop_reason, t.turns, len(env.heard)) == (expected, count, count)
    assert len(t.turn_records) == count
    assert t.num_tokens <= LIMITS.max_tokens
    assert t.rows[-1].mask[-1], "what stands behind the last sampled token is cut off"


def test_a_turn_that_was_cut_is_closed_as_context() -> None:
    t = run(FakeEnv([tool_says("1"), Turn(done=True)]), saying("0123456789~", "a"))
    text = "".join(chr(i) if i else "$" for i in t.rows[0].token_ids)
    assert text == "<system>Hello>0123456789$<tool>1>a$"
    assert not t.rows[0].mask[text.index("$")]


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


@pytest.mark.parametrize("chars", [5_000, 100_000])
def test_long_texts_are_rendered_off_the_loop_and_to_the_same_ids(chars: int) -> None:
    threads = []

    class Noting(FakeRenderer):
        def render_initial(self, *arguments: Any) -> list[int]:
            threads.append(threading.get_ident())
            return super().render_initial(*arguments)

    limits = replace(LIMITS, max_tokens=10**6)
    engine = FakeEngine(lambda *_: [ord("a"), STOP], 10**6)
    t = run(FakeEnv([tool_says("y" * chars), Turn(done=True)], prompt="x" * chars), engine, limits, renderer=Noting())
    text = "".join(chr(i) if i else "$" for i in t.rows[0].token_ids)
    assert text == f"<system>{'x' * chars}>a$<tool>{'y' * chars}>a$"
    assert {thread == threading.get_ident() for thread in threads} == {chars < 20_000}


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


def test_a_failure_to_close_costs_nothing() -> None:
    class Clingy(FakeEnv):
        async def close(self) -> None:
            raise OSError("still busy")

    assert run(Clingy([Turn(reward=2.0, done=True)]), saying("a")).reward == 2.0


def test_turns_are_sampled_with_seeds_of_their_own() -> None:
    seeds = []
    for number in (7, 8):
        engine = saying("a", "b")
        run(FakeEnv([tool_says("1"), Turn(done=True)]), engine, ticket=ticket(seed=number))
        seeds += [sampling.seed for _, _, sampling in engine.calls]
    assert len(set(seeds)) == 4
    assert len({name for name, _, _ in engine.calls}) == 2


def test_timings_and_progress_follow_the_phases() -> None:
    times = iter(range(1, 100))
    t = run(FakeEnv([tool_says("1"), Turn(done=True)]), saying("a", "b"), clock=lambda: float(next(times)))
    assert t.timings["generate"] == 2.0
    assert t.timings["environment"] + t.timings["generate"] == t.timings["total"]


def test_each_turn_has_its_times_and_tokens() -> None:
    class Clock:
        now = 0.0

    class Slow(FakeEnv):
        async def step(self, message: Any) -> Turn:
            Clock.now += 10.0
            return await super().step(message)

    class Working(FakeEngine):
        async def generate(self, *args: Any) -> Generation:
            Clock.now += 1.5
            return replace(await super().generate(*args), queue_s=queues[len(self.calls)])

    queues = [0.0, 0.5, None, 0.25]
    texts = iter(["ab", "c", "defg"])
    engine = Working(lambda *_: [*map(ord, next(texts)), STOP], LIMITS.max_tokens)
    user = Turn(messages=[{"role": "user", "content": "more"}])  # it breaks the prefix: a new row
    t = run(Slow([tool_says("1"), user, Turn(done=True)]), engine, clock=lambda: Clock.now)
    first, second, third = engine.calls
    assert t.turn_records == (
        TurnRecord(0.5, 1.5, 10.0, len(first[1]), 3),
        TurnRecord(None, 1.5, 10.0, len(second[1]) - len(first[1]) - 3, 2),
        TurnRecord(0.25, 1.5, 10.0, len(third[1]), 5),
    )
    assert len(t.rows) == 2
    assert sum(turn.sampled for turn in t.turn_records) == t.num_policy_tokens
    assert decode_trajectory(encode_trajectory(t)).turn_records == t.turn_records


def test_what_the_engine_prefilled_is_the_engines_to_say() -> None:
    class Counting(FakeEngine):
        async def generate(self, *args: Any) -> Generation:
            return replace(await super().generate(*args), prefilled=7)

    t = run(FakeEnv([Turn(done=True)]), Counting(lambda *_: [97, STOP], LIMITS.max_tokens))
    assert [turn.prefilled for turn in t.turn_records] == [7]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 120), min_size=0, max_size=14),
            st.booleans(),
            st.sampled_from(["tool", "user"]),
            st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_sampled_token_is_missing_repeated_or_encoded_again(turns: list[tuple[list[int], bool, str, str]]) -> None:
    outputs = iter([[*ids, STOP] if stops or not ids else ids for ids, stops, _, _ in turns] + [[STOP]])
    answers = [Turn(messages=[{"role": role, "content": text}]) for _, _, role, text in turns]
    engine = FakeEngine(lambda *_: next(outputs), LIMITS.max_tokens)
    t = run(FakeEnv([*answers, Turn(done=True)]), engine, EpisodeLimits(20, LIMITS.max_tokens, 10, 1.0))
    sampled = np.concatenate([row.token_ids[row.mask] for row in t.rows])
    assert sampled.tolist() == engine.said
    logprobs = np.concatenate([row.logprobs[row.mask] for row in t.rows])
    np.testing.assert_allclose(logprobs, -np.arange(len(engine.said)) / 1000, rtol=1e-6)
    for row in t.rows:
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs) == len(row.versions) <= LIMITS.max_tokens
        assert row.mask.any()
    assert decode_trajectory([bytes(f) for f in encode_trajectory(t)]).digest() == t.digest()
