"""Samplers, filters and the cut of a batch into shares."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.storage.payloads import Location
from asyncrl.buffer.rules import Rules
from asyncrl.buffer.selection import FILTERS, SAMPLERS, choose, share
from asyncrl.config import Config
from asyncrl.errors import ConfigError


def group(
    number: int, rewards: tuple[float, ...] = (0.0, 1.0), oldest: int = 0, uses: int = 0, stop: str = "done"
) -> Group:
    made = Group(number, 0, number, "t", len(rewards), "waiting", uses=uses)
    for index, reward in enumerate(rewards):
        made.store(index, Received(0, "a", "d", Location(0, 0, 1, 0), ((oldest, 5),), 9, 1, reward, "e", stop))
    return made


def numbers(sampler: str, groups: list[Group], count: int, version: int = 3) -> list[int]:
    return [g.number for g in choose(SAMPLERS[sampler], groups, version, count, Random(0))]


def test_samplers_take_what_their_name_says() -> None:
    groups = [group(0, oldest=1), group(1, (0.5, 0.5), oldest=3), group(2, oldest=2), group(3, (0.0, 0.1), oldest=3)]
    assert numbers("fifo", groups, 2) == [0, 1]
    assert numbers("freshest", groups, 2) == [1, 3]
    assert numbers("priority", groups, 2) == [0, 2]
    assert {
        n for seed in range(20) for n in [g.number for g in choose(SAMPLERS["uniform"], groups, 3, 1, Random(seed))]
    } == {0, 1, 2, 3}


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_unused_groups_come_first(sampler: str) -> None:
    groups = [group(0, uses=1), group(1), group(2, uses=1), group(3)]
    assert numbers(sampler, groups, 2) == [1, 3]
    assert len(set(numbers(sampler, groups, 3)) - {1, 3}) == 1


def test_a_sampler_that_breaks_its_contract_is_named() -> None:
    def greedy(candidates, version, count, rng):  # type: ignore[no-untyped-def]
        return [candidates[0]] * count

    with pytest.raises(ValueError, match=r"buffer\.sampler greedy"):
        choose(greedy, [group(0), group(1)], 0, 2, Random(0))


def test_filters() -> None:
    assert FILTERS["zero_variance"](group(0, (1.0, 1.0)))
    assert not FILTERS["zero_variance"](group(0))
    assert FILTERS["too_long"](group(0, stop="max_tokens"))
    assert not FILTERS["too_long"](group(0))


def test_an_unknown_sampler_is_a_config_error() -> None:
    config = Config.model_validate({"buffer": {"sampler": "fresh"}})
    with pytest.raises(ConfigError, match=r"buffer\.sampler: 'fresh' is not a known name"):
        Rules.of(config)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_shares_are_a_partition_even_in_number(costs: list[int], size: int) -> None:
    shares = [share(costs, rank, size) for rank in range(size)]
    assert sorted(place for s in shares for place in s) == list(range(len(costs)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    loads = [sum(costs[p] for p in s) for s in shares]
    if len(costs) % size == 0 and costs:
        assert max(loads) - min(loads) <= max(costs) * 2
