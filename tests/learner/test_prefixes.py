import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.prefixes import share_prefixes

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=8)


@given(ROWS)
def test_every_token_finds_a_state_computed_from_the_same_tokens(rows):
    """Rebuild, for each computed token, the tokens that it saw: they are those of every flat token that maps to it."""
    flat = torch.tensor([token for row in rows for token in row])
    plan = share_prefixes(flat, [len(row) for row in rows])
    computed = flat[plan.computed].tolist()
    seen = {}
    end = 0
    for s in plan.segments:
        assert s.start == end
        end = s.start + s.length
        before = computed[s.prefix_start : s.prefix_start + s.prefix]
        for i in range(s.length):
            seen[s.start + i] = [*before, *computed[s.start : s.start + i + 1]]
    assert end == len(computed)
    where = iter(plan.where.tolist())
    for row in rows:
        for i in range(len(row)):
            assert seen[next(where)] == row[: i + 1]


def test_a_row_said_again_costs_nothing():
    row = list(range(20))
    plan = share_prefixes(torch.tensor(row * 3), [20, 20, 20])
    assert len(plan.computed) == 20
    assert plan.where.tolist() == row * 3


def test_a_short_common_beginning_is_not_worth_it():
    plan = share_prefixes(torch.tensor([1, 2, 3, 1, 2, 4]), [3, 3])
    assert [s.prefix for s in plan.segments] == [0, 0]
