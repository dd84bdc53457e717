"""Every correction against the slow reference, and how they compose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.corrections import CORRECTIONS, Correction, CorrectionInputs, compose
from tests.learner import reference_objectives as reference
from tests.learner.flat_batches import FLATS, Flat, close, correction_inputs, shuffled, split, with_a_masked_token

CASES: list[tuple[str, dict[str, Any]]] = (
    [
        ("none", {}),
        ("tis", {"cap": 2.0}),
        ("tis", {"cap": 1.5, "level": "sequence"}),
        ("mis", {"low": 0.7, "high": 1.4}),
        ("mis", {"low": 0.5, "high": 2.0, "level": "sequence"}),
        ("mis", {"low": 0.5, "high": 2.0, "level": "sequence", "use_weight": False}),
        ("mis", {"low": 0.9, "high": 1.1, "level": "geometric"}),
        ("mis", {"low": 0.9, "high": 1.1, "level": "geometric", "weight": "token"}),
        ("icepop", {"low": 0.5, "high": 5.0}),
        ("clamp", {"low": 0.8, "high": 1.2}),
        ("veto", {"low": 0.6, "high": 2.0}),
    ]
    + [
        ("kl_reject", {"kind": kind, "level": level, "low": -0.1, "high": 0.3})
        for kind in ("k1", "k2", "k3")
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
    ]
    + [
        ("kl_reject", {"kind": kind, "level": "token", "low": -0.1, "high": 0.3, "direction": "proximal"})
        for kind in ("k1", "k2", "k3")
    ]
)


def correct(name: str, flat: Flat, **options: Any) -> Correction:
    more, options = split(options, CorrectionInputs)
    return CORRECTIONS[name](correction_inputs(flat.proximal, flat.behaviour, *flat.layout, **more), **options)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in CASES])
def test_weights_and_keep(name: str, options: dict[str, Any], case: str) -> None:
    flat = FLATS[case]
    got = correct(name, flat, **options)
    weights, keep = reference.correction(flat.rows, flat.floats["proximal"], flat.floats["behaviour"], name, **options)
    close(got.weights, weights)
    assert got.keep.tolist() == keep
    assert not got.weights.requires_grad


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("variant", ["token", "sequence"])
@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_opsm(anchor: str, variant: str, case: str) -> None:
    flat = FLATS[case]
    f = flat.floats
    got = correct(
        "opsm", flat, advantages=flat.advantages, current=flat.current, delta=0.05, anchor=anchor, variant=variant
    )
    assert got.keep.tolist() == reference.opsm(flat.rows, f[anchor], f["current"], f["advantages"], 0.05, variant)
    close(got.weights, got.keep.double())


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize("tau", [0.04, 1e-6, 10.0])
def test_m2po(tau: float, case: str) -> None:
    flat = FLATS[case]
    f = flat.floats
    given = {"advantages": flat.advantages, "current": flat.current}
    slow = (flat.rows, f["behaviour"], f["current"], f["advantages"], tau)
    assert correct("m2po", flat, tau=tau, **given).keep.tolist() == reference.m2po_paper(*slow)
    assert correct("m2po", flat, tau=tau, variant="cap", **given).keep.tolist() == reference.m2po_cap(*slow)
    expected = reference.m2po_all(flat.rows, f["proximal"], f["behaviour"], tau)
    assert correct("m2po", flat, tau=tau, variant="all").keep.tolist() == expected


def test_kl_reject_ratio_is_verls_reading() -> None:
    flat = FLATS["seed1"]
    ratio = correct("kl_reject", flat, kind="k1", variant="ratio", high=1.3)
    both = correct("kl_reject", flat, kind="k1", variant="ratio", low=1 / 1.3, high=1.3)
    w = (flat.proximal - flat.behaviour).exp()
    expected = flat.mask & (1 / w >= 1 / 1.3) & (1 / w <= 1.3)
    assert torch.equal(ratio.keep, expected)
    assert torch.equal(both.keep, expected)


@pytest.mark.parametrize(("name", "options"), [("tis", {}), ("mis", {"low": 0.5, "high": 2.0})])
def test_normalize(name: str, options: dict[str, Any]) -> None:
    flat = FLATS["seed3"]
    got = correct(name, flat, **options, normalize=True)
    torch.testing.assert_close(got.weights[flat.mask].mean(), torch.ones((), dtype=torch.float64))
    by_row = correct(name, flat, **options, level="sequence", normalize=True).weights
    first = [row[0] for row in flat.rows.rows if row]
    torch.testing.assert_close(by_row[first].mean(), torch.ones((), dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), extreme=st.booleans())
def test_composition(seed: int, extreme: bool) -> None:
    """Weights multiply, keep is the conjunction, the order does not matter, and weights are 0 where nothing is kept."""
    flat = Flat(seed, extreme=extreme)
    parts = [
        correct("tis", flat),
        correct("icepop", flat),
        correct("veto", flat, low=0.3),
        correct("tis", flat, cap=1.0),
    ]
    got, back = compose(parts), compose(parts[::-1])
    product = parts[0].weights * parts[1].weights * parts[2].weights * parts[3].weights
    torch.testing.assert_close(got.weights, product)
    torch.testing.assert_close(got.weights, back.weights)
    assert torch.equal(got.keep, parts[0].keep & parts[1].keep & parts[2].keep)
    assert (got.weights[~got.keep] == 0).all()
    assert not got.keep[~flat.mask].any()
    assert torch.isfinite(got.weights).all()
    assert {"tis/kept", "tis/kept_2", "icepop/kept", "veto/kept"} <= set(got.metrics)


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - {"m2po"}))
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_cutting_into_micro_batches_changes_nothing(name: str, seed: int) -> None:
    flat = Flat(seed)
    options: dict[str, Any] = {"mis": {"low": 0.5, "high": 2.0}, "clamp": {"high": 1.1}, "kl_reject": {"high": 0.1}}
    cut = seed % (flat.lengths.numel() + 1)
    at = int(flat.lengths[:cut].sum())

    def run(tokens: slice, rows: slice) -> torch.Tensor:
        extra = dict(options.get(name, {}))
        if name == "opsm":
            extra = {"advantages": flat.advantages[tokens], "current": flat.current[tokens]}
        more, extra = split(extra, CorrectionInputs)
        inputs = correction_inputs(
            flat.proximal[tokens], flat.behaviour[tokens], flat.mask[tokens], flat.lengths[rows], **more
        )
        return CORRECTIONS[name](inputs, **extra).weights

    whole = run(slice(None), slice(None))
    parts = [run(slice(None, at), slice(None, cut)), run(slice(at, None), slice(cut, None))]
    torch.testing.assert_close(torch.cat(parts), whole)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), several=st.booleans())
@pytest.mark.parametrize("alteration", [shuffled, with_a_masked_token])
def test_the_order_of_rows_and_masked_tokens_change_nothing(alteration: Any, seed: int, several: bool) -> None:
    flat = Flat(seed, several_rows=several)
    change, tokens = alteration(flat, seed)
    options: dict[str, Any] = {"mis": {"low": 0.5, "high": 2.0}, "clamp": {"high": 1.1}, "kl_reject": {"high": 0.1}}

    def weights(name: str, change: Any) -> torch.Tensor:
        extra = dict(options.get(name, {}))
        if name in ("opsm", "m2po"):
            extra = {k: change(k, getattr(flat, k)) for k in ("advantages", "current")}
        inputs = {k: change(k, getattr(flat, k)) for k in ("proximal", "behaviour", "mask", "lengths")}
        more, extra = split(extra, CorrectionInputs)
        return CORRECTIONS[name](correction_inputs(*inputs.values(), **more), **extra).weights

    for name in CORRECTIONS:
        before, after = weights(name, lambda _, x: x), weights(name, change)
        if alteration is shuffled:
            before = before[tokens]
        else:
            after = after[tokens]
        torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-9)


def test_a_missing_input_is_named() -> None:
    flat = FLATS["seed0"]
    with pytest.raises(TypeError, match="low"):
        correct("mis", flat, high=2.0)
    whole = correction_inputs(flat.proximal, flat.behaviour, *flat.layout)
    fields = {name: getattr(whole, name) for name in CorrectionInputs.__dataclass_fields__ if name != "advantages"}
    with pytest.raises(TypeError, match="advantages"):
        CorrectionInputs(**fields)
    with pytest.raises(ValueError, match="low nor high"):
        correct("kl_reject", flat)
    with pytest.raises(ValueError, match=r"low 2\.0 is above high 0\.5"):
        correct("icepop", flat, low=2.0, high=0.5)
    with pytest.raises(ValueError, match="list of corrections is empty"):
        compose([])
