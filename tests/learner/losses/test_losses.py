"""Every objective, and its gradient, against the slow reference; and what holds for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.losses import AGGREGATIONS, LOSSES, LossInputs, PolicyLoss, properties_of
from asyncrl.learner.losses.aggregation import AggregationInputs
from tests.learner import reference_objectives as reference
from tests.learner.flat_batches import FLATS, Flat, close, loss_inputs, shuffled, split, with_a_masked_token

CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"dual_clip": None}),
    ("ppo", {"dual_clip": None, "delta": 4.0}),
    ("decoupled_ppo", {}),
    ("gspo", {}),
    ("gspo", {"variant": "token"}),
    ("gspo", {"row_advantage": True}),
    ("luspo", {}),
    ("gmpo", {}),
    ("gmpo", {"weights": True}),
    ("sapo", {}),
    ("cispo", {}),
    ("cispo", {"variant": "bound", "clip_high": 3.0}),
    ("gpg", {}),
    ("reinforce", {}),
    ("reinforce", {"behaviour": True}),
    ("reinforce", {"behaviour": True, "level": "sequence"}),
    ("reinforce", {"behaviour": True, "variant": "ratio"}),
    ("topr", {}),
    ("topr", {"behaviour": True, "variant": "sequence"}),
    ("rollout_is", {"behaviour": True}),
    ("vespo", {}),
    ("vespo", {"weights": True}),
    ("dro", {"beta": 0.3}),
    ("dppo_tv", {}),
    ("dppo_tv", {"variant": "ratio", "kl_tau": 1e-3}),
    ("dppo_tv", {"symmetric": True}),
    ("dppo_kl", {}),
    ("dppo_kl", {"variant": "ratio"}),
    ("kl_cov", {"ratio": 0.2}),
]
ALWAYS = {"decoupled_ppo": ("weights",), "dppo_tv": ("behaviour",), "dppo_kl": ("behaviour",)}
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in CASES]


def inputs(name: str, options: dict[str, Any], flat: Flat) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options as tensors for asyncrl, and as lists for the reference."""
    tensors, lists = dict(options), dict(options)
    for key in ("weights", "behaviour"):
        if options.get(key) or key in ALWAYS.get(name, ()):
            tensors[key], lists[key] = getattr(flat, key), flat.floats[key]
    return tensors, lists


def run(name: str, flat: Flat, **options: Any) -> tuple[PolicyLoss, torch.Tensor]:
    current = flat.current.requires_grad_()
    more, options = split(options, LossInputs)
    return LOSSES[name](loss_inputs(current, flat.proximal, flat.advantages, *flat.layout, **more), **options), current


@pytest.mark.parametrize("case", [k for k in FLATS if k not in ("seed4", "seed5", "seed6", "seed7")])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_value_and_gradient(name: str, options: dict[str, Any], case: str) -> None:
    flat = FLATS[case]
    tensors, lists = inputs(name, options, flat)
    got, current = run(name, flat, **tensors)
    slow_current = torch.tensor(flat.floats["current"], dtype=torch.float64, requires_grad=True)
    want = reference.objective(
        flat.rows, name, slow_current, flat.floats["proximal"], flat.floats["advantages"], **lists
    )
    close(got.per_token, want.detach())
    towards = torch.cos(torch.arange(flat.mask.numel(), dtype=torch.float64))
    (got.per_token * towards).sum().backward()
    if want.requires_grad:
        (want * towards).sum().backward()
    expected = slow_current.grad if slow_current.grad is not None else torch.zeros_like(slow_current)
    assert current.grad is not None
    close(current.grad, expected)


@pytest.mark.parametrize("variant", ["sequence", "token"])
@pytest.mark.parametrize("mean_over", ["all", "kept"])
@pytest.mark.parametrize("case", ["seed0", "seed1", "seed2", "seed3"])
def test_gspo_under_rejection(case: str, mean_over: str, variant: str) -> None:
    """Of the kept tokens alone under `kept`, as in verl, whose rejections take tokens out of the mask beforehand."""
    flat = FLATS[case]
    weights = flat.weights.clone()
    weights[::3] = 0.0
    got, current = run("gspo", flat, weights=weights, mean_over=mean_over, variant=variant)
    lists = flat.floats | {"weights": weights.tolist()}
    slow = torch.tensor(lists["current"], dtype=torch.float64, requires_grad=True)
    options = {"mean_over": mean_over, "variant": variant, "weights": lists["weights"]}
    want = reference.objective(flat.rows, "gspo", slow, lists["proximal"], lists["advantages"], **options)
    close(got.per_token, want.detach())
    (got.per_token * weights).sum().backward()
    (want * weights).sum().backward()
    assert current.grad is not None
    assert slow.grad is not None
    close(current.grad, slow.grad)
    if mean_over == "kept" and variant == "sequence":
        assert current.grad[weights == 0].abs().max() == 0, "what a rejected token's logprob is does not matter"


def test_gspo_over_kept_tokens_is_gspo_of_a_row_without_the_others() -> None:
    """Both give the loss of the kept tokens; over all of them, a rejected token's ratio reaches the others."""
    mask, lengths = torch.tensor([True, True, True]), torch.tensor([3])
    current, proximal = torch.tensor([-1.0, -1.0, -9.0]).double(), torch.tensor([-1.0001, -1.0001, -1.0]).double()
    advantages = torch.ones(3).double()
    weights = torch.tensor([1.0, 1.0, 0.0]).double()

    def loss(mask: torch.Tensor, **options: Any) -> torch.Tensor:
        made = loss_inputs(current, proximal, advantages, mask, lengths, weights=weights)
        return (LOSSES["gspo"](made, **options).per_token * weights)[:2]

    without = loss(torch.tensor([True, True, False]))
    assert torch.equal(loss(mask, mean_over="kept"), without)
    assert float((loss(mask) - without).abs().min()) > 0.5


CLAMPED = ("ppo", "decoupled_ppo", "gspo", "luspo", "gmpo", "sapo", "cispo", "topr", "reinforce", "clip_cov", "kl_cov")


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_log_ratio_is_clamped_at_20_on_both_sides(name: str, sign: float) -> None:
    """Everywhere, as docs/reference/algorithms.md says; which other system clamps where is said there too."""
    mask, lengths = torch.tensor([True]), torch.tensor([1])
    options = {"dual_clip": None} if name in ("ppo", "decoupled_ppo") else {}
    found = []
    for beyond in (20.0, 25.0, 60.0):
        proximal = torch.zeros(1, dtype=torch.float64)
        current = torch.full((1,), sign * beyond, dtype=torch.float64)
        a = torch.full((1,), -1.0, dtype=torch.float64)
        made = loss_inputs(current, proximal, a, mask, lengths)
        found.append(
            LOSSES[name](made, **options).per_token / (current if name in ("cispo", "topr", "reinforce") else 1)
        )
    if name == "kl_cov":  # beside the ratio it has |current - proximal| itself
        found = [x - 0.1 * beyond for x, beyond in zip(found, (20.0, 25.0, 60.0), strict=True)]
    assert torch.allclose(found[1], found[0])
    assert torch.allclose(found[2], found[0])


@pytest.mark.parametrize("case", FLATS)
def test_clip_cov(case: str) -> None:
    flat = FLATS[case]
    f = flat.floats
    got, current = run("clip_cov", flat, generator=torch.Generator().manual_seed(3), ratio=0.1)
    plain, _ = run("ppo", flat, clip_low=0.2, clip_high=0.2, dual_clip=None)
    spared = set(((got.per_token == 0) & (plain.per_token != 0)).nonzero().squeeze(1).tolist())
    candidates = reference.cov_candidates(flat.rows, f["current"], f["proximal"], f["advantages"])
    policy_tokens = sum(flat.rows.mask)
    of_zero_loss = {i for i in candidates if plain.per_token[i].item() == 0}
    assert spared <= set(candidates)
    assert len(spared | of_zero_loss) >= min(max(int(0.1 * policy_tokens), 1), len(candidates))
    want = reference.objective(
        flat.rows,
        "clip_cov",
        torch.tensor(f["current"], dtype=torch.float64),
        f["proximal"],
        f["advantages"],
        spared=spared,
    )
    close(got.per_token, want)
    got.per_token.sum().backward()
    assert current.grad is not None
    assert (current.grad[list(spared)] == 0).all()


def test_clip_cov_draws_by_its_generator() -> None:
    flat = Flat(21)
    flat.floats["advantages"] = [a * 3 for a in flat.floats["advantages"]]

    def per_token(seed: int) -> torch.Tensor:
        return run("clip_cov", flat, generator=torch.Generator().manual_seed(seed), ratio=0.05)[0].per_token.detach()

    assert torch.equal(per_token(1), per_token(1))
    assert any(not torch.equal(per_token(1), per_token(seed)) for seed in range(2, 10))


def everything(name: str, flat: Flat) -> dict[str, Any]:
    extra: dict[str, Any] = {"clip_cov": {"generator": torch.Generator().manual_seed(0)}, "dro": {"beta": 0.1}}
    return {k: getattr(flat, k) for k in ALWAYS.get(name, ())} | extra.get(name, {})


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", ["extreme", "several_rows", "no_policy_token", "no_token"])
def test_finite_and_silent_outside_the_mask(case: str, name: str) -> None:
    """NaN logprobs of tool output reach neither loss nor gradient; without policy tokens the loss is exactly 0."""
    flat = FLATS[case]
    got, current = run(name, flat, **everything(name, flat))
    loss = AGGREGATIONS["token_mean"](AggregationInputs(got.per_token, *flat.layout))
    loss.backward()
    assert current.grad is not None
    assert torch.isfinite(got.per_token).all()
    assert torch.isfinite(current.grad).all()
    assert (got.per_token[~flat.mask] == 0).all()
    assert (current.grad[~flat.mask] == 0).all()
    assert not got.clipped[~flat.mask].any()
    assert all(torch.isfinite(v) and v.dim() == 0 and not v.requires_grad for v in got.metrics.values())
    if not flat.mask.any():
        assert loss.item() == 0.0


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov", "kl_cov"}))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_cutting_into_micro_batches_changes_nothing(name: str, seed: int) -> None:
    flat = Flat(seed)
    whole, _ = run(name, flat, **everything(name, flat))
    cut = seed % (flat.lengths.numel() + 1)
    at = int(flat.lengths[:cut].sum())
    parts = []
    for rows, tokens in ((slice(None, cut), slice(None, at)), (slice(cut, None), slice(at, None))):
        extra = {k: v[tokens] if isinstance(v, torch.Tensor) else v for k, v in everything(name, flat).items()}
        more, options = split(extra, LossInputs)
        inputs = loss_inputs(
            flat.current[tokens],
            flat.proximal[tokens],
            flat.advantages[tokens],
            flat.mask[tokens],
            flat.lengths[rows],
            **more,
        )
        parts.append(LOSSES[name](inputs, **options).per_token)
    torch.testing.assert_close(torch.cat(parts), whole.per_token.detach(), rtol=1e-12, atol=1e-12)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), several=st.booleans())
@pytest.mark.parametrize("alteration", [shuffled, with_a_masked_token])
def test_the_order_of_rows_and_masked_tokens_change_nothing(alteration: Any, seed: int, several: bool) -> None:
    flat = Flat(seed, several_rows=several)
    change, tokens = alteration(flat, seed)

    def per_token(fn: Any, extra: dict[str, Any], change: Any) -> torch.Tensor:
        inputs = {k: change(k, getattr(flat, k)) for k in ("current", "proximal", "advantages", "mask", "lengths")}
        extra = {k: change(k, v) if isinstance(v, torch.Tensor) else v for k, v in extra.items()}
        more, options = split(extra, LossInputs)
        return fn(loss_inputs(*inputs.values(), **more), **options).per_token

    for name in sorted(set(LOSSES) - {"clip_cov"}):  # which draws by place
        before = per_token(LOSSES[name], everything(name, flat), lambda _, x: x)
        after = per_token(LOSSES[name], everything(name, flat), change)
        if alteration is shuffled:
            before = before[tokens]
        else:
            after = after[tokens]
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-9)


def test_one_update_a_step_needs_no_proximal_forward() -> None:
    """With the detached current logprobs as proximal, decoupled PPO is exactly the weighted policy gradient."""
    flat = FLATS["seed2"]
    current = flat.current.requires_grad_()
    inputs = loss_inputs(current, current.detach(), flat.advantages, *flat.layout, weights=flat.weights)
    loss = LOSSES["decoupled_ppo"](inputs)
    loss.per_token.sum().backward()
    expected = torch.where(flat.mask, -flat.weights * flat.advantages, 0.0)
    torch.testing.assert_close(current.grad, expected)
    assert not loss.clipped.any()


def test_where_each_objective_meets_the_correction() -> None:
    where = {name: properties_of(fn).correction for name, fn in LOSSES.items()}
    assert {n for n, w in where.items() if w == "inside"} == {"decoupled_ppo", "gmpo", "vespo"}
    # Nothing of a demonstration was sampled: sft has nothing to correct.
    itself = {"reinforce", "topr", "rollout_is", "dppo_tv", "dppo_kl", "sft"}
    assert {n for n, w in where.items() if w == "itself"} == itself


@pytest.mark.parametrize("missing", ["weights", "behaviour", "generator", "lengths"])
def test_a_missing_input_is_named(missing: str) -> None:
    whole = loss_inputs(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.tensor([True]), torch.tensor([1]))
    fields = {name: getattr(whole, name) for name in LossInputs.__dataclass_fields__ if name != missing}
    with pytest.raises(TypeError, match=missing):
        LossInputs(**fields)


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LossInputs: advantages is \(2,\), expected \[1\]"):
        loss_inputs(torch.zeros(1), torch.zeros(1), torch.zeros(2), torch.tensor([True]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"dual_clip": 0.5}, "dual_clip"), ({"clip_low": -1.0}, "clip_low"), ({"delta": 1.1}, "delta")],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, float], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        run("ppo", FLATS["seed0"], **options)
