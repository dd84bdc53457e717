"""Every estimator against the slow reference, and the promises that hold for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.advantages import ESTIMATORS, EstimatorInputs
from tests.learner import reference
from tests.learner.flat_batches import FLATS, Flat, close, estimator_inputs, shuffled, split, with_a_masked_token

GROUP_RELATIVE: list[tuple[str, str, dict[str, Any]]] = [
    ("grpo", "grpo", {}),
    ("grpo", "dr_grpo", {"scale_by_std": False}),
    ("grpo", "grpo_leave_one_out_mean", {"variant": "leave_one_out_mean"}),
    ("grpo", "grpo_leave_one_out", {"variant": "leave_one_out"}),
    ("grpo", "grpo_batch_std", {"variant": "batch_std"}),
    ("dr_grpo", "dr_grpo", {}),
    ("rloo", "rloo", {}),
    ("opo", "opo", {}),
    ("gpg", "gpg", {}),
    ("grpo_passk", "grpo_passk", {}),
    ("max_rl", "max_rl", {}),
    ("max_rl", "max_rl_eps", {"variant": "eps"}),
]


def estimate(name: str, flat: Flat, **options: Any) -> Any:
    more, options = split(options, EstimatorInputs)
    layout = (flat.rewards, flat.mask, flat.lengths, flat.groups)
    return ESTIMATORS[name](estimator_inputs(*layout, episodes=flat.episodes, **more), **options)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize(("name", "slow", "options"), GROUP_RELATIVE, ids=lambda x: x if isinstance(x, str) else "")
def test_group_relative(name: str, slow: str, options: dict[str, Any], case: str) -> None:
    flat = FLATS[case]
    close(estimate(name, flat, **options).advantages, reference.group_relative(flat.rows, flat.floats["rewards"], slow))


@pytest.mark.parametrize("case", FLATS)
def test_reinforce_pp_baseline(case: str) -> None:
    flat = FLATS[case]
    expected = reference.reinforce_pp_baseline(flat.rows, flat.floats["rewards"])
    close(estimate("reinforce_pp_baseline", flat).advantages, expected)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("variant", ["token", "episode"])
def test_gdpo(variant: str, case: str) -> None:
    flat = FLATS[case]
    components = [flat.floats["rewards"], [math.sin(3 * i) for i in range(len(flat.floats["rewards"]))]]
    got = estimate(
        "gdpo",
        flat,
        reward_components=torch.tensor(components, dtype=torch.float64),
        weights=[1.0, 0.3],
        variant=variant,
    )
    close(got.advantages, reference.gdpo(flat.rows, components, [1.0, 0.3], variant))


@pytest.mark.parametrize("case", FLATS)
def test_gae(case: str) -> None:
    flat = FLATS[case]
    a, returns = reference.gae(flat.rows, flat.floats["rewards"], flat.floats["values"], 0.97, 0.9)
    got = estimate("gae", flat, values=flat.values, gamma=0.97, lam=0.9, whiten=False)
    close(got.advantages, a)
    close(got.returns, returns)
    whitened = estimate("gae", flat, values=flat.values, gamma=0.97, lam=0.9)
    close(whitened.advantages, reference.whiten(a, flat.rows.mask))
    close(whitened.returns, returns)


@pytest.mark.parametrize("case", FLATS)
def test_vapo_gae(case: str) -> None:
    flat = FLATS[case]

    def lam(length: int) -> float:
        return max(0.0, 1 - 1 / (0.2 * length)) if 0.2 * length >= 1 else 0.0

    a, _ = reference.gae(flat.rows, flat.floats["rewards"], flat.floats["values"], 1.0, lam_of_length=lam)
    _, returns = reference.gae(flat.rows, flat.floats["rewards"], flat.floats["values"], 1.0, 1.0)
    got = estimate("vapo_gae", flat, values=flat.values, alpha=0.2)
    close(got.advantages, a)
    close(got.returns, returns)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize(("rho_max", "c_max"), [(1.0, 1.0), (2.0, 1.2)])
def test_vtrace(rho_max: float, c_max: float, case: str) -> None:
    flat = FLATS[case]
    f = flat.floats
    expected = reference.vtrace(
        flat.rows, f["rewards"], f["values"], f["current"], f["behaviour"], 0.98, rho_max, c_max
    )
    got = estimate(
        "vtrace",
        flat,
        values=flat.values,
        logprobs=flat.current,
        behaviour=flat.behaviour,
        gamma=0.98,
        rho_max=rho_max,
        c_max=c_max,
    )
    close(got.advantages, expected[0])
    close(got.returns, expected[1])


def test_vtrace_on_policy_is_the_return_minus_the_value() -> None:
    flat = FLATS["seed1"]
    got = estimate("vtrace", flat, values=flat.values, logprobs=flat.behaviour, behaviour=flat.behaviour)
    g = reference.returns(flat.rows, flat.floats["rewards"], 1.0)
    close(got.returns, g)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("variant", ["carry", "reset"])
def test_reinforce_pp(variant: str, case: str) -> None:
    flat = FLATS[case]
    g = reference.returns(flat.rows, flat.floats["rewards"], 0.95, reset=variant == "reset")
    got = estimate("reinforce_pp", flat, gamma=0.95, variant=variant)
    close(got.returns, g)
    close(got.advantages, reference.whiten(g, flat.rows.mask))


@pytest.mark.parametrize("case", FLATS)
def test_reinforce_pp_by_positions_is_slimes_loop(case: str) -> None:
    """Its loop runs over every position of a row: context has reward 0, and the return is discounted over it too."""
    flat = FLATS[case]
    g = reference.returns_by_position(flat.rows, flat.floats["rewards"], 0.95)
    got = estimate("reinforce_pp", flat, gamma=0.95, variant="positions")
    close(got.returns, g)
    close(got.advantages, reference.whiten(g, flat.rows.mask))
    close(estimate("reinforce_pp", flat, variant="positions").returns, estimate("reinforce_pp", flat).returns)


@pytest.mark.parametrize(("variant", "first"), [("carry", 0.5), ("positions", 0.0625), ("reset", 0.0)])
def test_reinforce_pp_around_a_tools_output(variant: str, first: float) -> None:
    """Two sampled tokens around one of three tokens: what the second earns reaches the first by gamma, or gamma^4."""
    flat: Any = {"lengths": torch.tensor([5]), "groups": torch.tensor([0]), "episodes": torch.tensor([0])}
    mask = torch.tensor([True, False, False, False, True])
    inputs = EstimatorInputs(rewards=torch.tensor([0.0, 0, 0, 0, 1]), mask=mask, behaviour=torch.zeros(5), **flat)
    assert float(ESTIMATORS["reinforce_pp"](inputs, gamma=0.5, variant=variant).returns[0]) == first


def test_reinforce_pp_by_positions_of_one_long_row() -> None:
    """A power of the whole row's length is neither 0 nor infinite where it is not needed."""
    n = 3000
    flat: Any = {"lengths": torch.tensor([n]), "groups": torch.tensor([0]), "episodes": torch.tensor([0])}
    inputs = EstimatorInputs(rewards=torch.ones(n), mask=torch.ones(n).bool(), behaviour=torch.zeros(n), **flat)
    got = ESTIMATORS["reinforce_pp"](inputs, gamma=0.5, variant="positions").returns
    assert float(got[-1]) == 1
    assert float((got - 2).abs()[:-40].max()) < 1e-6


@pytest.mark.parametrize("case", FLATS)
def test_remax(case: str) -> None:
    flat = FLATS[case]
    baseline = torch.sin(flat.episodes.double())
    g = reference.returns(flat.rows, flat.floats["rewards"], 1.0)
    of_token = [math.sin(e) for e, row in zip(flat.rows.episodes, flat.rows.all_rows, strict=True) for _ in row]
    expected = [(x - b) if m else 0.0 for x, b, m in zip(g, of_token, flat.rows.mask, strict=True)]
    got = estimate("remax", flat, baseline=baseline)
    close(got.advantages, expected)
    close(got.returns, g)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("variant", ["column", "token"])
@pytest.mark.parametrize("zero_tail", [True, False])
def test_optimal_token_baseline(zero_tail: bool, variant: str, case: str) -> None:
    flat = FLATS[case]
    if variant == "column" and len(set(flat.rows.episodes)) < len(flat.rows.episodes):
        pytest.skip("places of one row")
    f = flat.floats
    expected = reference.optimal_token_baseline(
        flat.rows, f["rewards"], f["proximal"], f["sum_pi_sq"], variant, f["weights"], zero_tail
    )
    got = estimate(
        "optimal_token_baseline",
        flat,
        logprobs=flat.proximal,
        sum_pi_sq=flat.sum_pi_sq,
        weights=flat.weights,
        variant=variant,
        zero_tail=zero_tail,
    )
    close(got.advantages, expected[0])
    close(got.returns, expected[1])


def call_all(flat: Flat, change: Callable[[str, Any], Any] = lambda name, x: x) -> dict[str, Any]:
    """Every estimator with all it could want; `change` may alter an input by name."""
    given = {name: change(name, getattr(flat, name)) for name in flat.floats}
    lengths, groups, episodes = (change(n, getattr(flat, n)) for n in ("lengths", "groups", "episodes"))
    mask, turn_of, states = (change(n, getattr(flat, n)) for n in ("mask", "turn_of", "states"))
    extra: dict[str, dict[str, Any]] = {
        "gdpo": {"reward_components": torch.stack([given["rewards"], given["rewards"] ** 2])},
        "remax": {"baseline": torch.cos(groups.double())},
        "vtrace": {"logprobs": given["current"], "behaviour": given["behaviour"]},
        "optimal_token_baseline": {"logprobs": given["proximal"], "sum_pi_sq": given["sum_pi_sq"], "variant": "token"},
    }
    found = {}
    for name, fn in ESTIMATORS.items():
        more, options = split(extra.get(name, {}), EstimatorInputs)
        by_turn = {"turn_of": turn_of, "states": states, "turn_rewards": given["turn_rewards"]}
        more = {"values": given["values"], "episodes": episodes} | by_turn | more
        found[name] = fn(estimator_inputs(given["rewards"], mask, lengths, groups, **more), **options)
    return found


@pytest.mark.parametrize("case", FLATS)
def test_nothing_outside_the_mask_and_nothing_infinite(case: str) -> None:
    flat = FLATS[case]
    for name, got in call_all(flat).items():
        for x in (got.advantages, got.returns):
            assert x.shape == flat.mask.shape, name
            assert torch.isfinite(x).all(), name
            assert (x[~flat.mask] == 0).all(), name


WHITENED = ("reinforce_pp_baseline", "gdpo")
RELATIVE = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "max_rl", "optimal_token_baseline")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*RELATIVE, *WHITENED])
def test_groups_of_one_and_of_equal_rewards_have_exactly_zero(name: str, dtype: torch.dtype) -> None:
    lengths = torch.tensor([1] * 8)
    mask = torch.ones(8, dtype=torch.bool)
    groups = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.0, 1.0, 0.6, 0.3], dtype=dtype)
    extra: dict[str, Any] = {}
    if name == "gdpo":
        extra = {"reward_components": rewards[None]}
    if name == "optimal_token_baseline":
        extra = {"logprobs": torch.full((8,), -1.0), "sum_pi_sq": torch.full((8,), 0.5)}
    if name == "reinforce_pp_baseline":
        extra = {"keep_zero": True}
    more, options = split(extra, EstimatorInputs)
    got = ESTIMATORS[name](estimator_inputs(rewards, mask, lengths, groups, **more), **options).advantages
    if name != "gdpo":  # whitened over the batch afterwards: see the table in docs/reference/algorithms.md
        assert (got[:4] == 0).all()
    assert (got[4:] != 0).any()
    assert got.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "max_rl", "grpo_passk"])
def test_a_group_of_one_passes_its_reward_when_asked(name: str) -> None:
    inputs = estimator_inputs(
        torch.tensor([0.0, 0.7]), torch.tensor([True, True]), torch.tensor([2]), torch.tensor([5])
    )
    got = ESTIMATORS[name](inputs, singleton="reward")
    torch.testing.assert_close(got.advantages, torch.tensor([0.7, 0.7]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), several=st.booleans())
def test_the_order_of_episodes_does_not_matter(seed: int, several: bool) -> None:
    flat = Flat(seed, several_rows=several)
    change, tokens = shuffled(flat, seed)
    before, after = call_all(flat), call_all(flat, change)
    for name in ESTIMATORS:
        torch.testing.assert_close(before[name].advantages[tokens], after[name].advantages, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-3, 3))
def test_shifting_rewards_does_not_matter_to_a_mean_baseline(seed: int, shift: float) -> None:
    flat = Flat(seed)

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != "rewards":
            return x
        per_row = torch.repeat_interleave(shift / flat.lengths.clamp(min=1).double(), flat.lengths)
        return x + per_row

    full = flat.lengths > 0
    token_full = torch.repeat_interleave(full, flat.lengths)
    if not bool(full.all()):
        return  # a row without a token cannot carry the shift
    before, after = call_all(flat), call_all(flat, change)
    for name in ("dr_grpo", "rloo", "opo", "reinforce_pp_baseline"):
        torch.testing.assert_close(
            before[name].advantages[token_full], after[name].advantages[token_full], rtol=1e-7, atol=1e-7
        )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), several=st.booleans())
def test_a_masked_token_changes_nothing(seed: int, several: bool) -> None:
    flat = Flat(seed, several_rows=several)
    change, tokens = with_a_masked_token(flat, seed)
    before, after = call_all(flat), call_all(flat, change)
    for name in ESTIMATORS:
        torch.testing.assert_close(before[name].advantages, after[name].advantages[tokens], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gae", "values"),
        ("vapo_gae", "values"),
        ("vtrace", "values"),
        ("remax", "baseline"),
        ("gdpo", "reward_components"),
        ("optimal_token_baseline", "logprobs"),
        ("turn_returns", "turn_of"),
        ("turn_grpo", "turn_of"),
        ("turn_gae", "turn_of"),
        ("gigpo", "turn_of"),
    ],
)
def test_a_missing_input_is_named(name: str, missing: str) -> None:
    flat = FLATS["seed0"]
    with pytest.raises(TypeError, match=missing):
        ESTIMATORS[name](estimator_inputs(flat.rewards, flat.mask, flat.lengths, flat.groups))


def test_wrong_layouts_are_refused() -> None:
    flat = FLATS["seed0"]
    with pytest.raises(ValueError, match="rewards is"):
        estimator_inputs(flat.rewards[:-1], flat.mask, flat.lengths, flat.groups)
    with pytest.raises(ValueError, match="lengths sum to"):
        estimator_inputs(flat.rewards, flat.mask, flat.lengths + 1, flat.groups)
    with pytest.raises(ValueError, match="mask is"):
        estimator_inputs(flat.rewards, flat.mask.float(), flat.lengths, flat.groups)
    one_episode = {"episodes": torch.zeros_like(flat.groups)}
    with pytest.raises(ValueError, match="different groups"):
        ESTIMATORS["grpo"](estimator_inputs(flat.rewards, flat.mask, flat.lengths, flat.groups, **one_episode))
