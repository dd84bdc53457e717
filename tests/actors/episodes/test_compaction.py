"""A conversation that outgrows its row goes on from the policy's own summary, and every token of it is trained on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.counts import Counts
from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.compaction import Compaction
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.result import EpisodeResult
from asyncrl.actors.player import player
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.trajectory import Row
from asyncrl.wire import decode_trajectory, encode_trajectory
from tests.actors.episodes.playing import LIMITS, run, saying
from tests.actors.fakes import FakeEnv, FakeRenderer, ticket, tool_says

COMPACT = replace(LIMITS, max_turns=6, max_tokens=150, compact=0.3, compact_request="sum up")
LONG = "x" * 20


class AppendingRenderer(FakeRenderer):
    """A user message does not change what stands before it."""

    def render_tail(self, messages_before: Any, new_messages: Any, tools: Any, **options: Any) -> list[int] | None:
        return self.render_initial(new_messages, tools)


def texts_of(rows: Sequence[Row]) -> list[str]:
    return ["".join(chr(i) if i else "$" for i in row.token_ids) for row in rows]


def test_a_long_row_ends_with_a_summary_and_a_new_one_begins_from_it() -> None:
    env = FakeEnv([tool_says(LONG), tool_says(LONG), Turn(reward=1.0, done=True)])
    t = run(env, saying("a", "b", "so far", "c"), COMPACT, renderer=AppendingRenderer())
    first, second = texts_of(t.rows)
    assert first == f"<system>Hello>a$<tool>{LONG}>b$<tool>{LONG}<user>sum up>so far$"
    assert second.startswith("<system>Hello<assistant>so far<user>This is your summary")
    assert second.endswith(">c$")
    assert [int(row.mask.sum()) for row in t.rows] == [2 + 2 + 7, 2]
    # The environment heard neither the request nor the summary.
    assert [m["content"] for m in env.heard] == ["a", "b", "c"]
    assert (t.reward, t.stop_reason, t.turns, len(t.turn_records)) == (1.0, "done", 4, 4)
    assert t.turn_records[2].environment is None


def test_a_summary_is_a_turn_that_earns_nothing_and_leaves_the_state() -> None:
    answers = [replace(tool_says(LONG), reward=r, state=state) for r, state in ((0.5, "one"), (0.25, "two"))]
    env = FakeEnv([*answers, Turn(reward=1.0, done=True)])
    t = run(env, saying("a", "b", "so far", "c"), COMPACT, renderer=AppendingRenderer())
    assert [turn.reward for turn in t.turn_rewards] == [0.5, 0.25, 0.0, 1.0]
    assert [turn.state for turn in t.turn_rewards] == [None, b"one", None, b"two"]
    assert [turn.spans[0].tokens for turn in t.turn_rewards] == [2, 2, 7, 2]
    assert decode_trajectory(encode_trajectory(t)).turn_rewards == t.turn_rewards


def test_a_summary_is_counted_with_the_tokens_before_and_after_it() -> None:
    progress = Progress(0.0)
    progress.compacted(90, 30)
    progress.compacted(70, 20)
    counts = Counts()
    counts.add(progress)
    assert (counts.compactions, counts.compacted_from, counts.compacted_to) == (2, 160, 50)


def test_without_the_option_the_same_episode_ends_at_the_limit() -> None:
    env = FakeEnv([tool_says(LONG), tool_says(LONG), tool_says(LONG)])
    limits = replace(COMPACT, max_tokens=70, compact=0.0)
    assert run(env, saying("a", "b", "c"), limits).stop_reason == "max_tokens"


def test_where_the_request_breaks_the_prefix_the_summary_ends_the_row_that_begins_there() -> None:
    env = FakeEnv([tool_says(LONG), tool_says(LONG), Turn(done=True)])
    t = run(env, saying("a", "b", "so far", "c"), COMPACT)
    assert [int(row.mask.sum()) for row in t.rows] == [4, 7, 2]
    assert texts_of(t.rows)[1].endswith("<user>sum up>so far$")


def test_no_summary_where_no_turn_is_left_to_use_it() -> None:
    env = FakeEnv([tool_says(LONG), tool_says(LONG), tool_says(LONG)])
    t = run(env, saying("a", "b", "c"), replace(COMPACT, max_turns=3, max_tokens=200))
    assert [m["last"] for m in env.heard] == [False, False, True]
    assert len(t.rows) == 1


def test_a_request_for_which_a_row_has_no_room_is_refused() -> None:
    room = Compaction(50.0, 6, "x" * 80)
    room.check(FakeRenderer(), 200, 10)
    with pytest.raises(ConfigError, match=r"leaves 40 of env.max_tokens = 90 tokens, but .* may need 97: lower"):
        room.check(FakeRenderer(), 90, 10)
    replace(room, from_tokens=math.inf).check(FakeRenderer(), 90, 10)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"env.compact": 0.9}, r"env.compact is 0.9: .* leaves 26 tokens .* actors.max_new_tokens = 128: lower"),
        ({"env.compact": 0.4, "env.max_turns": 2}, r"env.max_turns 2: a summary is a turn"),
        ({"env.compact": 0.4, "learner.advantage": "turn_grpo"}, r"learner.advantage is turn_grpo with variant turn"),
        (
            {"env.compact": 0.4, "learner.advantage_by_env": {"single_turn": {"name": "turn_grpo", "gamma": 0.9}}},
            r"learner.advantage_by_env.single_turn is turn_grpo .*, and env.compact is 0.4",
        ),
        ({"actors.episode_max_s": 60}, r"actors.episode_max_s is 60 but actors.episode_s 1800"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.load(overrides=fields)


def test_process_rewards_can_be_compared_across_summaries() -> None:
    given = {"learner.advantage": "turn_grpo", "learner.advantage_options": {"variant": "process"}}
    assert Config.load(overrides={"env.compact": 0.4, **given}).env.compact == 0.4


def test_the_room_is_checked_with_the_limits_of_each_environment_of_a_mix() -> None:
    envs = {"long": {"env": "lookup"}, "short": {"env": "lookup", "max_tokens": 150, "max_new_tokens": 60}}
    given = {"env.name": "mix", "env.max_tokens": 4096, "env.options": {"envs": envs}, "env.compact": 0.5}

    async def opened(config: Config) -> None:
        async with player(config, saying(), FakeRenderer(), actor="actor-0"):
            pass

    config = Config.load(overrides={**given, "env.compact_request": "x" * 20})
    with pytest.raises(ConfigError, match=r"leaves 75 of env.options.envs.short.max_tokens = 150 tokens, .* need 87"):
        asyncio.run(opened(config))
    asyncio.run(opened(Config.load(overrides={**given, "env.compact_request": "x"})))
    envs["short"]["max_new_tokens"] = 80
    with pytest.raises(ConfigError, match=r"of env.options.envs.short.max_tokens = 150 it leaves 75 tokens"):
        Config.load(overrides=given)


def test_a_group_score_reads_what_came_before_a_summary_too() -> None:
    env = FakeEnv([tool_says(LONG), tool_says(LONG), tool_says(LONG), tool_says(LONG), Turn(done=True)])
    limits = replace(COMPACT, max_turns=9)
    said = saying("a", "b", "sum 1", "c", "sum 2", "d", "sum 3", "e")

    async def episode() -> EpisodeResult:
        return await play(ticket(2), lambda: env, said, AppendingRenderer(), limits, Progress(0.0))

    result = asyncio.run(episode())
    assert result.turns - len(env.heard) == len(result.rows) - 1 >= 2, "several summaries"
    policy = [m["content"] for m in result.messages if m["role"] == "assistant"]
    assert policy == ["a", "b", "sum 1", "c", "sum 2", "d", "sum 3", "e"][: result.turns]
    assert [m["content"] for m in result.messages].count("Hello") == 1
    assert [m["content"] for m in result.messages].count("sum up") == len(result.rows) - 1
