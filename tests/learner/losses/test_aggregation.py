"""Aggregations against the slow reference, and independence of the cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.losses.aggregation import AGGREGATIONS, AggregationInputs, denominator, unit_tokens
from tests.learner import reference
from tests.learner.flat_batches import FLATS, Flat

CASES: list[tuple[str, dict[str, Any]]] = [
    ("token_mean", {}),
    ("seq_mean_token_mean", {}),
    ("seq_mean_token_mean", {"rows": "all"}),
    ("seq_mean_token_sum", {}),
    ("seq_mean_token_sum", {"rows": "all"}),
    ("seq_mean_token_sum_norm", {"norm": 7.0}),
    ("seq_mean_token_sum_norm", {"norm": 7.0, "rows": "all"}),
    ("seq_mean_token_sum_norm", {"norm": 7.0, "rows": "none"}),
    ("prompt_mean", {}),
]
IDS = ["-".join([n, *map(str, o.values())]) for n, o in CASES]


def aggregate(name: str, x: torch.Tensor, flat: Flat, **options: Any) -> torch.Tensor:
    layout = {"episodes": flat.episodes, "groups": flat.groups}
    return AGGREGATIONS[name](AggregationInputs(x, *flat.layout, **layout), **options)


@pytest.mark.parametrize("case", FLATS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_value(name: str, options: dict[str, Any], case: str) -> None:
    flat = FLATS[case]
    got = aggregate(name, flat.advantages, flat, **options)
    want = reference.aggregate(flat.rows, name, flat.floats["advantages"], **options)
    assert float(got) == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), several=st.booleans(), pieces=st.integers(1, 5))
def test_sum_over_micro_batches(name: str, options: dict[str, Any], seed: int, several: bool, pieces: int) -> None:
    """Rows dealt to micro-batches in any way, episodes and prompts torn apart: the losses and gradients add up."""
    flat = Flat(seed, several_rows=several)
    layout = {"episodes": flat.episodes, "groups": flat.groups}
    rows_option = {k: v for k, v in options.items() if k == "rows"}
    whole_x = flat.advantages.requires_grad_()
    whole = aggregate(name, whole_x, flat, **options)
    whole.backward()

    total = denominator(name, *flat.layout, **layout, **rows_option)
    tokens_of_unit = unit_tokens(name, *flat.layout, **layout)
    dealt = torch.randint(pieces, (flat.lengths.numel(),), generator=torch.Generator().manual_seed(seed))
    cuts = list(torch.arange(flat.mask.numel()).split(flat.lengths.tolist()))
    part_x = flat.advantages.requires_grad_()
    added = torch.zeros((), dtype=torch.float64)
    for piece in range(pieces):
        rows = (dealt == piece).nonzero().squeeze(1)
        tokens = torch.cat([cuts[int(b)] for b in rows]) if len(rows) else torch.arange(0)
        inputs = AggregationInputs(
            part_x[tokens],
            flat.mask[tokens],
            flat.lengths[rows],
            flat.episodes[rows],
            flat.groups[rows],
            total,
            tokens_of_unit[rows],
        )
        added = added + AGGREGATIONS[name](inputs, **options)
    added.backward()
    torch.testing.assert_close(added, whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(part_x.grad, whole_x.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["no_policy_token", "no_token"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_without_a_policy_token_it_is_zero_with_a_graph(name: str, options: dict[str, Any], case: str) -> None:
    flat = FLATS[case]
    x = flat.advantages.requires_grad_()
    got = aggregate(name, x, flat, **options)
    got.backward()
    assert float(got) == 0.0
    assert x.grad is not None
    assert (x.grad == 0).all()


def test_an_episode_of_several_rows_weighs_one() -> None:
    lengths = torch.tensor([1, 1, 1])
    mask = torch.ones(3, dtype=torch.bool)
    x = torch.tensor([1.0, 3.0, 10.0])
    episodes = torch.tensor([4, 4, 9])
    inputs = AggregationInputs(x, mask, lengths, episodes)
    assert float(AGGREGATIONS["seq_mean_token_mean"](inputs)) == (2 + 10) / 2
    assert float(AGGREGATIONS["seq_mean_token_sum"](inputs)) == (4 + 10) / 2


def test_norm_is_the_longest_row_of_a_whole_step() -> None:
    flat = FLATS["seed0"]
    longest = max(len(row) for row in flat.rows.rows)
    inputs = AggregationInputs(flat.advantages, *flat.layout)
    got = AGGREGATIONS["seq_mean_token_sum_norm"](inputs)
    assert float(got) == float(AGGREGATIONS["seq_mean_token_sum_norm"](inputs, norm=longest))


def test_errors_name_what_is_missing() -> None:
    flat = FLATS["seed0"]
    inputs = AggregationInputs(flat.advantages, *flat.layout)
    with pytest.raises(TypeError, match="groups"):
        AGGREGATIONS["prompt_mean"](inputs)
    with pytest.raises(TypeError, match="groups"):
        denominator("prompt_mean", *flat.layout)
    with pytest.raises(ValueError, match="mean_of_means"):
        denominator("mean_of_means", *flat.layout)
    with pytest.raises(TypeError, match="norm"):
        AGGREGATIONS["seq_mean_token_sum_norm"](dataclasses.replace(inputs, denominator=3.0))
    with pytest.raises(ValueError, match="norm is 0"):
        AGGREGATIONS["seq_mean_token_sum_norm"](inputs, norm=0.0)
