from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actors.engines.protocol import Generation
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.trajectory import CONTEXT, TurnRecord
from asyncrl.wire import decode_trajectory, encode_trajectory
from tests.actors.episodes.playing import LIMITS, run, saying
from tests.actors.fakes import STOP, FakeEngine, FakeEnv, ticket, tool_says


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
    assert [sum(span.tokens for span in turn.spans) for turn in t.turn_rewards] == [r.sampled for r in t.turn_records]


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


def test_each_turn_has_what_it_earned_in_the_state_that_the_turn_before_left() -> None:
    user = {"role": "user", "content": "more"}  # it breaks the prefix: a new row
    turns = [
        replace(tool_says("1"), reward=0.5, rewards={"found": 1.0}, state="hall"),
        Turn(messages=[user], reward=-0.25),
        Turn(reward=2.0, done=True, state=b"the end"),
    ]
    env = FakeEnv(turns)
    env.reset_state = b"start"  # type: ignore[attr-defined]
    t = run(env, saying("ab", "c", "def"))
    first, second = t.turn_rewards[:2]
    assert (first.reward, first.state, first.rewards) == (0.5, b"start", {"found": 1.0})
    assert (second.reward, second.state, second.rewards) == (-0.25, b"hall", {})
    assert (t.turn_rewards[2].reward, t.turn_rewards[2].state) == (2.0, None)
    assert t.reward == sum(turn.reward for turn in t.turn_rewards)
    said = [
        "".join(chr(i) if i else "$" for s in turn.spans for i in t.rows[s.row].token_ids[s.start : s.start + s.tokens])
        for turn in t.turn_rewards
    ]
    assert said == ["ab$", "c$", "def$"]
    assert [span.row for turn in t.turn_rewards for span in turn.spans] == [0, 0, 1]
    assert decode_trajectory(encode_trajectory(t)).turn_rewards == t.turn_rewards


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"state": "x" * 65}, r"state has 65 bytes, at most 64 are recorded: give asyncrl.state_key of it"),
        ({"state": 7}, r"state is a int, expected a text, bytes or None"),
        ({"rewards": {str(i): 0.0 for i in range(1025)}}, r"rewards has 1025 names, at most 1024"),
    ],
)
def test_what_cannot_be_recorded_of_a_turn_fails_its_episode(turn: dict[str, Any], said: str) -> None:
    with pytest.raises(EpisodeFailed, match=said):
        run(FakeEnv([Turn(done=True, **turn)]), saying("a"))


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
