"""What `asyncrl try` concludes from episodes, each conclusion with and without its cause."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.trajectory import StopReason, TurnRecord
from asyncrl.trial.findings import LOST, Limits, findings
from asyncrl.trial.text import MAX_CHARS, conversation, episode_line, shortened, summary
from asyncrl.trial.tried import Piece, Tried

LIMITS = Limits(max_turns=6, max_tokens=256, max_new_tokens=48, tool_calls="hermes")


def tried(reward: float, stop: StopReason = "done", content: str = "4", name: str = "add", breaks: int = 0) -> Tried:
    record = TurnRecord(None, 0.5, 0.25, 9, 3)
    turn = Piece(f"{content}<end>", True, "policy", content, ((name, "{}"),), 3, record)
    return Tried("t", reward, {"score": reward}, {}, stop, (Piece("2 + 2"), turn), 1.0, breaks, 1)


def silent(reward: float) -> Tried:
    return dataclasses.replace(tried(reward), pieces=(Piece("2 + 2"), Piece("<end>", True, "policy", "", (), 1)))


def test_episodes_of_which_some_succeed_raise_no_finding() -> None:
    assert findings([[tried(0), tried(1)], [tried(1), tried(0)]], LIMITS, ("user message",)) == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[tried(0), tried(0)]], ["all 2 rewards are 0", "format of the answer"]),
        ([[tried(1), tried(1)]], ["all 2 rewards are 1", "solves these tasks already"]),
        ([[silent(0), silent(0)]], ["all 2 rewards are 0", "said nothing"]),
        ([[tried(0, "length"), tried(0, "length")]], ["all 2 rewards are 0", "cut by a limit"]),
        ([[tried(0), tried(0)], [tried(1), tried(1)]], ["2 of 2 groups have equal rewards"]),
        ([[tried(0), tried(1, "max_turns")]], ["1 of 2 episodes were cut by env.max_turns (6)"]),
        ([[tried(0), tried(1, "max_tokens")]], ["1 of 2 episodes were cut by env.max_tokens (256)"]),
        ([[tried(0), tried(1, "length")]], ["1 of 2 episodes were cut by actors.max_new_tokens (48)"]),
        ([[tried(0), tried(1, name="")]], ["1 of 2 tool calls could not be parsed", "actors.tool_calls hermes"]),
        ([[tried(0), tried(1, breaks=3)]], ["1 of 2 episodes became several rows, 3 times", "user message"]),
        ([[tried(0), tried(1), "no shop"]], ["1 of 3 episodes failed: no shop"]),
        ([["no shop", LOST, LOST], [tried(0), tried(1)]], ["3 of 5 episodes failed, 1 of them like this: no shop"]),
    ],
)
def test_each_cause_gives_one_sentence_that_names_it(groups: list[list[Tried | str]], words: list[str]) -> None:
    said = " ".join(findings(groups, LIMITS, ("user message",)))
    assert [word for word in words if word not in said] == []


def test_one_group_of_several_with_equal_rewards_is_usual() -> None:
    assert findings([[tried(1), tried(1)], [tried(1), tried(0)]], LIMITS) == []


def test_a_single_episode_says_nothing_about_equal_rewards() -> None:
    assert findings([[tried(0)]], LIMITS) == []


def test_an_episode_is_told_with_its_calls_and_the_cost_of_each_turn() -> None:
    lines = list(conversation(tried(1)))
    assert any(line.endswith("-> calls add {}") for line in lines)
    assert any(line.endswith("3 tokens in 0.500 s, environment 0.250 s") for line in lines)
    assert episode_line(1, 4, tried(1)) == (
        "episode 1 of 4: reward 1 (score 1), done, 1 turn, 3 tokens sampled, 1.00 s"
    )
    assert episode_line(2, 4, "no shop") == "episode 2 of 4: failed: no shop"


def test_the_summary_gives_the_spread_of_the_rewards_and_their_parts() -> None:
    said = "\n".join(summary([tried(0), tried(1)], failed=1, tasks=1, seconds=2.0))
    assert "1 task, 3 episodes in 2.0 s, 1 failed" in said
    assert "reward   0.5 on average, 0 to 1" in said
    assert "score: 0.5 on average, 0 to 1" in said


def test_a_long_context_is_shown_without_its_middle() -> None:
    text = "a" * MAX_CHARS + "b" * MAX_CHARS
    cut = shortened(text)
    assert cut.startswith("aaa")
    assert cut.endswith("bbb")
    assert f"{len(text) - MAX_CHARS} more characters" in cut
