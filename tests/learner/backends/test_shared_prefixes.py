import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.backends.shared_prefixes import WORTH, share_prefixes

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=8)


@given(ROWS)
def test_every_token_finds_a_state_computed_from_the_same_tokens(rows):
    """Rebuild, for each computed token, the tokens that it saw: they are those of every flat token that maps to it."""
    flat = torch.tensor([token for row in rows for token in row])
    plan = share_prefixes(flat, [len(row) for row in rows])
    computed = flat[plan.computed].tolist()
    seen = list(range(len(computed))) if plan.seen is None else plan.seen.tolist()
    saw = {}
    end = 0
    for s in plan.segments:
        assert s.start == end
        end = s.start + s.length
        visible, seen = seen[: s.prefix + s.length], seen[s.prefix + s.length :]
        assert visible[s.prefix :] == list(range(s.start, end))
        for i in range(s.length):
            saw[s.start + i] = [computed[j] for j in visible[: s.prefix + i + 1]]
    assert end == len(computed)
    assert not seen
    where = iter(plan.where.tolist())
    for row in rows:
        for i in range(len(row)):
            assert saw[next(where)] == row[: i + 1]


@given(ROWS)
def test_no_beginning_that_is_worth_it_is_computed_twice(rows):
    flat = torch.tensor([token for row in rows for token in row])
    plan = share_prefixes(flat, [len(row) for row in rows])
    distinct = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(plan.computed) <= len(distinct) + (WORTH - 1) * (len(rows) - 1)


def test_a_row_said_again_costs_nothing():
    row = list(range(20))
    plan = share_prefixes(torch.tensor(row * 3), [20, 20, 20])
    assert len(plan.computed) == 20
    assert plan.where.tolist() == row * 3


def test_branches_of_a_branch_are_shared_wherever_their_rows_stand():
    trunk, branch = list(range(10)), list(range(20, 30))
    rows = [[*trunk, *branch, 1], [*range(40, 50)], [*trunk, 3], [*trunk, *branch, 2]]
    plan = share_prefixes(torch.tensor([t for row in rows for t in row]), [len(row) for row in rows])
    assert len(plan.computed) == 10 + 10 + 10 + 3
    assert sorted(s.prefix for s in plan.segments) == [0, 0, 10, 20]


def test_a_short_common_beginning_is_not_worth_it():
    plan = share_prefixes(torch.tensor([1, 2, 3, 1, 2, 4]), [3, 3])
    assert [s.prefix for s in plan.segments] == [0, 0]
    assert plan.seen is None
