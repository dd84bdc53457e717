"""Estimators by turn against slow references, against other systems' formulas, and against those by episode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrl.learner.advantages import ESTIMATORS, Advantages, EstimatorInputs
from tests.learner import reference, reference_turns
from tests.learner.flat_batches import FLATS, Flat, close, estimator_inputs, split
from tests.learner.reference_turns import Turn


def estimate(name: str, flat: Flat, **options: Any) -> Advantages:
    more, options = split(options, EstimatorInputs)
    layout = (flat.rewards, flat.mask, flat.lengths, flat.groups)
    by_turn = {"turn_of": flat.turn_of, "turn_rewards": flat.turn_rewards, "states": flat.states}
    return ESTIMATORS[name](estimator_inputs(*layout, episodes=flat.episodes, **by_turn | more), **options)


def turns(flat: Flat) -> dict[int, list[Turn]]:
    return reference_turns.turns(flat.rows, flat.turn_of.tolist(), flat.floats["turn_rewards"], flat.states.tolist())


@pytest.mark.parametrize("case", FLATS)
def test_turn_returns(case: str) -> None:
    flat = FLATS[case]
    g = reference_turns.turn_returns(flat.rows, turns(flat), 0.9)
    close(estimate("turn_returns", flat, gamma=0.9, whiten=False).advantages, g)
    whitened = estimate("turn_returns", flat, gamma=0.9)
    close(whitened.advantages, reference.whiten(g, flat.rows.mask))
    close(whitened.returns, g)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("variant", ["turn", "process"])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_turn_grpo(scale_by_std: bool, variant: str, case: str) -> None:
    flat = FLATS[case]
    expected = reference_turns.turn_grpo(flat.rows, turns(flat), 0.9, scale_by_std, variant == "process")
    got = estimate("turn_grpo", flat, gamma=0.9, variant=variant, scale_by_std=scale_by_std)
    close(got.advantages, expected)


@pytest.mark.parametrize("case", FLATS)
def test_turn_gae(case: str) -> None:
    flat = FLATS[case]
    a, target = reference_turns.turn_gae(flat.rows, turns(flat), flat.floats["values"], 0.97, 0.8)
    got = estimate("turn_gae", flat, values=flat.values, gamma=0.97, lam=0.8, whiten=False)
    close(got.advantages, a)
    close(got.returns, target)
    whitened = estimate("turn_gae", flat, values=flat.values, gamma=0.97, lam=0.8)
    close(whitened.advantages, reference.whiten(a, flat.rows.mask))


@pytest.mark.parametrize("case", [name for name in FLATS if not name.startswith("several")])
def test_bi_level_gae_is_that_of_ragen(case: str) -> None:
    """On rows of one episode each, where every turn ends with a reward, which is how RAGEN finds the ends."""
    flat = FLATS[case]
    rewards, values = [0.0] * len(flat.rows.mask), flat.floats["values"]
    for episode in turns(flat).values():
        for turn in episode:
            rewards[turn.tokens[-1]] = 0.5 + abs(turn.reward)
    got = estimate(
        "turn_gae", flat, values=flat.values, turn_rewards=torch.tensor(rewards, dtype=torch.float64),
        variant="bi_level", gamma=0.95, token_gamma=0.99, lam=0.9, whiten=False,
    )  # fmt: skip
    a, target = [], []
    for row in flat.rows.all_rows:
        of_row = [[x[i] for i in row] for x in (rewards, values, flat.rows.mask)]
        mine = reference_turns.ragen_bi_level(of_row[0], of_row[1], of_row[2], 0.99, 0.9, 0.95)  # type: ignore[arg-type]
        a += mine[0]
        target += mine[1]
    close(got.advantages, a)
    close(got.returns, target)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("statistics", ["episodes", "turns"])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_gigpo(scale_by_std: bool, statistics: str, case: str) -> None:
    flat = FLATS[case]
    reward = flat.rows.episode_reward(flat.floats["rewards"])
    by = turns(flat)
    if statistics == "episodes":  # an episode of which no token was sampled counts too
        by |= {e: [] for e in reward if e not in by}
    expected = reference_turns.gigpo(flat.rows, by, reward, 0.7, 0.9, scale_by_std, statistics == "turns")
    got = estimate("gigpo", flat, omega=0.7, gamma=0.9, scale_by_std=scale_by_std, statistics=statistics)
    close(got.advantages, expected)


class Rows:
    """One group of episodes as verl-agent has them: a row of one token for each turn, with its observation."""

    def __init__(self, *episodes: list[tuple[str, float]], group: list[int] | None = None) -> None:
        self.observed = [seen for episode in episodes for seen, _ in episode]
        self.earned = [r for episode in episodes for _, r in episode]
        self.trajectory = [e for e, episode in enumerate(episodes) for _ in episode]
        self.number = [k for episode in episodes for k, _ in enumerate(episode)]
        self.index = [(group or [0] * len(episodes))[e] for e in self.trajectory]
        self.total = [sum(r for _, r in episodes[e]) for e in self.trajectory]

    def returns(self, gamma: float) -> list[float]:
        out = []
        for i, (e, k) in enumerate(zip(self.trajectory, self.number, strict=True)):
            later = [j for j in range(i, len(self.earned)) if self.trajectory[j] == e]
            out.append(sum(gamma ** (self.number[j] - k) * self.earned[j] for j in later))
        return out

    def inputs(self) -> EstimatorInputs:
        """Each turn a row of its episode: a token of context and a sampled one."""
        n = len(self.earned)
        states = {seen: i for i, seen in enumerate(dict.fromkeys(self.observed))}

        def on(x: list[Any], fill: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.tensor([v for each in x for v in (fill, each)], dtype=dtype)

        return estimator_inputs(
            on(self.earned, 0.0), torch.tensor([False, True] * n), torch.full((n,), 2), torch.tensor(self.index),
            episodes=torch.tensor(self.trajectory), turn_of=on(self.number, -1, torch.long),
            turn_rewards=on(self.earned, 0.0), states=on([states[seen] for seen in self.observed], -1, torch.long),
        )  # fmt: skip


THREE = Rows(
    [("start", 0.0), ("door", 0.0), ("key", 10.0)],
    [("start", 0.0), ("wall", -0.1), ("start", 0.0), ("door", -0.1)],
    [("start", 0.5), ("door", 0.0)],
    [("start", 0.0), ("key", 10.0)],
    [("start", 0.0), ("key", 3.0), ("door", 0.0)],
    group=[0, 0, 0, 1, 1],
)


@pytest.mark.parametrize("across_rows", [True, False])
@pytest.mark.parametrize("remove_std", [True, False])
def test_gigpo_is_that_of_its_authors(remove_std: bool, across_rows: bool) -> None:
    expected = reference_turns.verl_agent_gigpo(
        THREE.total, THREE.returns(0.95), THREE.observed, THREE.index, THREE.trajectory, 1.0, remove_std, across_rows
    )
    got = ESTIMATORS["gigpo"](
        THREE.inputs(), gamma=0.95, scale_by_std=not remove_std, statistics="turns" if across_rows else "episodes"
    )
    close(got.advantages[1::2], expected)


def test_gigpo_by_hand() -> None:
    """Two siblings meet at the door: one then earns 1, the other nothing. R is 1 and 0, their mean 0.5, the return at
    the door 1 and 0, at the start 0.5 and 0, with means 0.5 and 0.25."""
    rows = Rows([("start", 0.0), ("door", 1.0)], [("start", 0.0), ("door", 0.0), ("cellar", 0.0)])
    got = ESTIMATORS["gigpo"](rows.inputs(), omega=2.0, gamma=0.5, scale_by_std=False).advantages[1::2]
    close(got, [0.5 + 2 * 0.25, 0.5 + 2 * 0.5, -0.5 - 2 * 0.25, -0.5 - 2 * 0.5, -0.5])


def test_a_state_is_compared_inside_its_group_only() -> None:
    """ROLL groups equal states of different tasks together; here each group is as if it were alone."""
    alone = Rows([("start", 0.0), ("key", 10.0)], [("start", 0.0), ("key", 3.0), ("door", 0.0)])
    expected = ESTIMATORS["gigpo"](alone.inputs()).advantages
    close(ESTIMATORS["gigpo"](THREE.inputs()).advantages[-len(expected) :], expected)


def test_gigpo_without_any_state_is_refused() -> None:
    flat = FLATS["seed0"]
    unnamed = torch.where(flat.turn_of == 0, flat.states, -1)
    with pytest.raises(ValueError, match="no turn after the first has a state"):
        estimate("gigpo", flat, states=unnamed)


def single(flat: Flat, *, together: bool = False) -> EstimatorInputs:
    """Every episode as one turn, which earned all of its reward, in a state of its own, or all in one; each token is
    one of the policy, and episodes without any are left out."""
    of_token = torch.repeat_interleave(flat.episodes, flat.lengths)
    everything = torch.ones_like(flat.mask)
    rewards = torch.zeros_like(flat.rewards)
    for episode in flat.episodes.unique():
        ends = (of_token == episode).nonzero()[-1:, 0]
        rewards[ends] = flat.rewards[of_token == episode].sum()
    whole = estimator_inputs(
        rewards, everything, flat.lengths, flat.groups, episodes=flat.episodes,
        turn_of=torch.zeros_like(of_token), turn_rewards=rewards,
        states=torch.zeros_like(of_token) if together else of_token,
        values=torch.tensor(flat.floats["values"], dtype=torch.float64),
    )  # fmt: skip
    played = torch.isin(flat.episodes, of_token).nonzero()[:, 0]
    return whole.take(played, torch.arange(len(of_token)))


@pytest.mark.parametrize("case", ["seed0", "seed1", "seed2", "several_rows"])
def test_with_one_turn_an_episode_each_is_an_estimator_by_episode(case: str) -> None:
    flat = FLATS[case]
    one = single(flat)
    cases: list[dict[str, Any]] = [{}, {"scale_by_std": False}, {"singleton": "reward"}]
    for options in cases:
        grpo = ESTIMATORS["grpo"](one, **options).advantages
        close(ESTIMATORS["turn_grpo"](one, **options).advantages, grpo)
        close(ESTIMATORS["turn_grpo"](one, variant="process", **options).advantages, grpo)
        close(ESTIMATORS["gigpo"](one, **options).advantages, grpo)  # no two siblings in one state
    close(ESTIMATORS["turn_returns"](one).advantages, ESTIMATORS["reinforce_pp"](one).advantages)
    gae = ESTIMATORS["gae"](one, gamma=0.9, lam=0.7)
    by_turn = ESTIMATORS["turn_gae"](one, variant="bi_level", token_gamma=0.9, lam=0.7)
    close(by_turn.advantages, gae.advantages)
    close(by_turn.returns, gae.returns)
    together = single(flat, together=True)  # their only turns are compared a second time
    close(ESTIMATORS["gigpo"](together, omega=0.5).advantages, 1.5 * ESTIMATORS["grpo"](together).advantages)


def test_a_turn_of_one_token_each_is_gae() -> None:
    flat = FLATS["several_rows"]
    each = torch.full_like(flat.turn_of, -1)
    for tokens in flat.rows.episode_tokens().values():
        for number, i in enumerate(tokens):
            each[i] = number
    rewards = torch.where(flat.mask, flat.rewards, 0.0)
    got = estimate("turn_gae", flat, turn_of=each, turn_rewards=rewards, values=flat.values, gamma=0.9, lam=0.7)
    expected = estimate("gae", flat, values=flat.values, gamma=0.9, lam=0.7)
    close(got.advantages, expected.advantages)
    close(got.returns, expected.returns)


@pytest.mark.parametrize("name", ["turn_returns", "turn_grpo", "turn_gae", "gigpo"])
def test_an_episode_of_an_asyncrl_that_kept_no_turns_is_refused(name: str) -> None:
    flat = FLATS["seed0"]
    without = flat.turn_of.clone()
    without[flat.mask.nonzero()[0]] = -1
    with pytest.raises(ValueError, match="no record of what each turn earned"):
        estimate(name, flat, turn_of=without, values=flat.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_returns_have_exactly_zero(dtype: torch.dtype) -> None:
    """0.1 three times, whose mean is not 0.1 in floating point."""
    equal = {"rewards": torch.full((3,), 0.1, dtype=dtype), "turn_rewards": torch.full((3,), 0.1, dtype=dtype)}
    layout = {"mask": torch.ones(3, dtype=torch.bool), "lengths": torch.tensor([1] * 3), "groups": torch.zeros(3)}
    marks = {"turn_of": torch.zeros(3, dtype=torch.int32), "states": torch.zeros(3, dtype=torch.int32)}
    for name in ("turn_grpo", "gigpo"):
        assert (ESTIMATORS[name](estimator_inputs(**equal, **layout, **marks)).advantages == 0).all()
