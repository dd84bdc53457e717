"""A run whose rewards do not differ says so once, with the most likely reason."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.learner.reporting.no_signal import NoSignal
from asyncrl.trajectory import Row, StopReason, TicketId, Trajectory


def episode(
    group: int, index: int, reward: float, stop: StopReason = "done", tokens: tuple[int, ...] | None = None
) -> Trajectory:
    said = tokens if tokens is not None else (7, 8, 9, 10 + index)
    n = len(said)
    row = Row(np.array(said, np.int32), np.ones(n, np.bool_), np.full(n, -1.0, np.float32), np.zeros(n, np.int32))
    return Trajectory(
        id=TicketId(0, group, index), attempt=0, kind="train", actor="a", task_id=f"t{group}", env="e", rows=(row,),
        reward=reward, rewards={}, turns=1, stop_reason=stop,
    )  # fmt: skip


def batch(
    *rewards: tuple[float, ...], stop: StopReason = "done", tokens: tuple[int, ...] | None = None
) -> list[Trajectory]:
    return [episode(g, i, r, stop, tokens) for g, group in enumerate(rewards) for i, r in enumerate(group)]


def said(trajectories: list[Trajectory]) -> str:
    judge = NoSignal(80)
    assert [judge.note(trajectories) for _ in range(2)] == ["", ""]
    sentence = judge.note(trajectories)
    assert [judge.note(trajectories) for _ in range(5)] == [""] * 5, "it is said once"
    return sentence


@pytest.mark.parametrize(
    ("trajectories", "words"),
    [
        (batch((0.0, 0.0), (0.0, 0.0)), ("All 12 rewards so far are 0", "compare an answer with its ground_truth")),
        (batch((0.0, 0.0), (0.0, 0.0), stop="max_turns"), ("are 0", "12 of 12 episodes were ended by env.max_turns")),
        (batch((0.0, 0.0), (0.0, 0.0), stop="length"), ("are 0", "were cut by actors.max_new_tokens")),
        (batch((0.0, 0.0), (0.0, 0.0), tokens=(2,)), ("are 0", "the policy says nothing")),
        (batch((0.0, 0.0), (0.0, 0.0), tokens=(2, 3, 4)), ("are 0", "are the same, token by token")),
        (batch((1.0, 1.0), (1.0, 1.0)), ("are 1", "solves these tasks already")),
        (batch((0.0, 0.0), (1.0, 1.0)), ("within each of the 2 groups", "always or never solved")),
        (batch((0.3, 0.3), (0.3, 0.3)), ("are 0.3", "does not depend on the answer")),
    ],
)
def test_it_names_what_it_sees(trajectories: list[Trajectory], words: tuple[str, str]) -> None:
    sentence = said(trajectories)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("trajectories", [batch((0.0, 1.0), (0.0, 0.0)), batch((0.0,), (1.0,))])
def test_rewards_that_differ_are_no_news(trajectories: list[Trajectory]) -> None:
    assert said(trajectories) == ""


def test_one_difference_ends_the_judgement() -> None:
    judge, same = NoSignal(80), batch((0.0, 0.0), (0.0, 0.0))
    assert judge.note(batch((0.0, 1.0))) == ""
    assert [judge.note(same) for _ in range(5)] == [""] * 5


def test_a_short_run_is_judged_by_its_steps() -> None:
    assert NoSignal(1).note(batch((0.0, 0.0))).startswith("All 2 rewards so far are 0")
