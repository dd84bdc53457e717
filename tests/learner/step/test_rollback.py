"""All updates of a training step, or none."""

from __future__ import annotations

import pytest

from asyncrl.learner.step.rollback import Refused, Rollback


class FakeTrained:
    """Notes what it is told to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mark(self) -> None:
        self.calls.append("mark")

    def discard(self) -> None:
        self.calls.append("discard")

    def rollback(self) -> None:
        self.calls.append("rollback")


@pytest.mark.parametrize(
    ("updates", "refused_at", "expected"),
    [
        (1, None, []),
        (1, 0, ["discard"]),
        (2, None, ["mark"]),
        (2, 0, ["mark", "discard"]),
        (2, 1, ["mark", "discard", "rollback"]),
    ],
)
def test_a_refused_update_takes_back_those_before_it(updates: int, refused_at: int | None, expected: list[str]) -> None:
    trained = [FakeTrained(), FakeTrained()]
    with Rollback(trained, updates) as rollback:
        for number in range(updates):
            if number == refused_at:
                raise Refused("loss is nan")
            rollback.applied += 1
    assert [one.calls for one in trained] == [expected, expected]
    assert rollback.why == ("" if refused_at is None else "loss is nan")


def test_any_other_error_passes_through() -> None:
    trained = FakeTrained()
    with pytest.raises(RuntimeError, match="out of memory"), Rollback([trained], 2):
        raise RuntimeError("out of memory")
    assert trained.calls == ["mark"]
