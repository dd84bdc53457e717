from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.learner.batch import flatten
from asyncrl.trajectory import TicketId, TurnReward
from tests.learner.tiny import random_trajectory, with_turns

RNG = np.random.default_rng


def test_rows_lie_end_to_end_in_the_batchs_order() -> None:
    rng = RNG(0)
    made = [random_trajectory(g, i, rng, rows=1 + i) for g in (7, 3) for i in range(2)]
    batch = flatten(list(reversed(made)), groups=(7, 3))
    in_order = [row for t in made for row in t.rows]
    assert batch.lengths.tolist() == [len(row) for row in in_order]
    assert batch.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.episodes.tolist() == [0, 1, 1, 2, 3, 3]
    assert batch.token_ids.tolist() == [x for row in in_order for x in row.token_ids.tolist()]
    assert batch.mask.tolist() == [x for row in in_order for x in row.mask.tolist()]
    assert batch.behaviour.tolist() == [x for row in in_order for x in row.logprobs.tolist()]
    assert batch.versions.tolist() == [x for row in in_order for x in row.versions.tolist()]


def test_an_episodes_reward_stands_once_on_its_last_policy_token() -> None:
    t = dataclasses.replace(random_trajectory(0, 0, RNG(1), rows=3), reward=2.5)
    silent = dataclasses.replace(t.rows[2], mask=np.zeros_like(t.rows[2].mask))
    t = dataclasses.replace(t, rows=(t.rows[0], t.rows[1], silent))
    batch = flatten([t], groups=(0,))
    (at,) = batch.rewards.nonzero()[:, 0].tolist()
    last = len(t.rows[0]) + int(np.flatnonzero(t.rows[1].mask)[-1])
    assert (at, float(batch.rewards[at])) == (last, 2.5)


def test_named_rewards_stand_where_the_reward_does() -> None:
    rng = RNG(6)
    made = [dataclasses.replace(random_trajectory(0, i, rng), reward=i + 1.0) for i in range(2)]
    made[0] = dataclasses.replace(made[0], rewards={"b": 5.0, "a": 2.0})
    made[1] = dataclasses.replace(made[1], rewards={"b": 7.0})
    batch = flatten(made, groups=(0,))
    (first, last) = batch.rewards.nonzero()[:, 0].tolist()
    assert batch.reward_components[:, [first, last]].tolist() == [[2.0, 0.0], [5.0, 7.0]]
    assert float(batch.reward_components.sum()) == 14.0
    assert torch.equal(batch.take(torch.tensor([1])).reward_components.sum(1), torch.tensor([0.0, 7.0]))


def test_old_tokens_lose_their_loss_but_not_their_reward() -> None:
    t = dataclasses.replace(random_trajectory(0, 0, RNG(2), versions=(0, 5)), reward=1.0)
    batch = flatten([t], groups=(0,), mask_before=6)
    assert not batch.mask.any()
    assert float(batch.rewards.sum()) == 1.0
    kept = flatten([t], groups=(0,), mask_before=3)
    assert torch.equal(kept.mask, kept.versions >= 3)
    assert 0 < int(kept.mask.sum()) < t.num_policy_tokens


def test_take_gives_rows_and_their_tokens() -> None:
    rng = RNG(3)
    batch = flatten([random_trajectory(g, i, rng) for g in range(3) for i in range(3)], groups=(0, 1, 2))
    rows = torch.tensor([4, 0, 8])
    part = batch.take(rows)
    assert part.lengths.tolist() == batch.lengths[rows].tolist()
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    expected = [batch.token_ids[starts[r] : starts[r] + int(batch.lengths[r])] for r in rows.tolist()]
    assert torch.equal(part.token_ids, torch.cat(expected))
    assert torch.equal(part.token_ids, batch.token_ids[batch.tokens_of(rows)])
    assert torch.equal(part.rewards, batch.rewards[batch.tokens_of(rows)])


def test_weights_follow_their_trajectories() -> None:
    rng = RNG(5)
    made = [random_trajectory(g, i, rng, rows=2) for g in (1, 0) for i in range(2)]
    batch = flatten(made, groups=(0, 1), weights=(0.0, 0.0, 1.0, 0.5))
    assert batch.row_weights.tolist() == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_what_cannot_be_a_batch() -> None:
    t = random_trajectory(0, 0, RNG(4))
    with pytest.raises(ValueError, match=r"0\.5\.1 is in none"):
        flatten([dataclasses.replace(t, id=TicketId(0, 5, 1))], groups=(0,))
    with pytest.raises(ValueError, match="no trajectory"):
        flatten([], groups=())
    first = dataclasses.replace(t.rows[0], mask=np.ones_like(t.rows[0].mask))
    with pytest.raises(ValueError, match="begins with a sampled token"):
        flatten([dataclasses.replace(t, rows=(first,))], groups=(0,))


def test_turns_stand_on_their_tokens_and_what_they_earned_on_the_last() -> None:
    t = with_turns(random_trajectory(0, 0, RNG(7), rows=2), 0.5, -1.0, 2.0)
    batch = flatten([t], groups=(0,))
    assert torch.equal(batch.turn_of >= 0, batch.sampled)
    starts = [0, len(t.rows[0])]
    expected = torch.zeros(len(batch.mask))
    for number, turn in enumerate(t.turn_rewards):
        for span in turn.spans:
            at = starts[span.row] + span.start
            assert batch.turn_of[at : at + span.tokens].tolist() == [number] * span.tokens
        expected[starts[turn.spans[-1].row] + turn.spans[-1].start + turn.spans[-1].tokens - 1] = turn.reward
    assert batch.turn_rewards.tolist() == expected.tolist()


def test_what_a_turn_without_a_token_earned_counts_for_its_neighbour() -> None:
    t = with_turns(random_trajectory(0, 0, RNG(8)), 1.0, 2.0)
    nothing = [TurnReward(r, ()) for r in (16.0, 32.0, 64.0)]
    turns = (nothing[0], t.turn_rewards[0], nothing[1], t.turn_rewards[1], nothing[2])
    t = dataclasses.replace(t, turns=5, reward=115.0, turn_rewards=turns)
    batch = flatten([t], groups=(0,))
    assert batch.turn_rewards[batch.turn_rewards != 0].tolist() == [16.0 + 1.0 + 32.0, 2.0 + 64.0]
    assert set(batch.turn_of.tolist()) == {-1, 1, 3}


def test_states_are_numbered_within_their_group_and_a_first_turn_by_its_prompt() -> None:
    made = [random_trajectory(g, i, RNG(9)) for g in (0, 1) for i in range(2)]  # siblings with equal prompts
    keys = [(b"hall", b"cellar"), (None, b"cellar"), (None, None), (None, b"hall")]
    named = [with_turns(t, 0.0, 1.0, states=states) for t, states in zip(made, keys, strict=True)]
    batch = flatten(named, groups=(0, 1))

    def state(episode: int, turn: int) -> int:
        here = torch.repeat_interleave(batch.episodes, batch.lengths) == episode
        (number,) = set(batch.states[here & (batch.turn_of == turn)].tolist())
        return int(number)

    assert state(0, 1) == state(1, 1) >= 0
    assert state(2, 1) == -1
    assert len({state(0, 0), state(1, 0), state(0, 1), state(3, 1)}) == 4
    prompts = [
        flatten([t], groups=(t.id.group,)).token_ids[: t.turn_rewards[0].spans[0].start].tolist() for t in named[2:]
    ]
    assert (state(2, 0) == state(3, 0)) == (prompts[0] == prompts[1])
    twins = [dataclasses.replace(named[2], id=TicketId(0, 1, i)) for i in range(2)]
    other = dataclasses.replace(named[2], id=TicketId(0, 0, 0))
    states = flatten([*twins, other], groups=(1, 0)).states.view(3, -1).max(1).values
    assert states[0] == states[1] != states[2]


def test_a_trajectory_without_turns_has_no_turns() -> None:
    batch = flatten([random_trajectory(0, 0, RNG(10))], groups=(0,))
    assert (batch.turn_of == -1).all()
    assert not batch.turn_rewards.any()
