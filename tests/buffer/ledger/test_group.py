"""What a group knows of the trajectories that it stores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.ledger.group import Group, Received
from asyncrl.buffer.ledger.storage.payloads import Location

SIZE = 3
spans = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (min(pair), max(pair)))


def received(span: tuple[int, int]) -> Received:
    versions = tuple((version, 1) for version in sorted(set(span)))
    return Received(0, "actor-0", "", Location(0, 0, 1, 0), versions, 2, 1, 0.0, "math", "done")


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.none() | spans), max_size=12))
def test_its_oldest_and_newest_version_are_those_of_what_it_stores(
    changes: list[tuple[int, tuple[int, int] | None]],
) -> None:
    group = Group(0, 0, 0, "0", SIZE, "in_flight")
    stored: dict[int, tuple[int, int]] = {}
    for index, span in changes:
        group.store(index, None if span is None else received(span))
        stored.pop(index, None)
        if span is not None:
            stored[index] = span
        assert group.oldest == min((oldest for oldest, _ in stored.values()), default=None)
        assert group.newest == max((newest for _, newest in stored.values()), default=None)
