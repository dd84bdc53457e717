"""A step of which many tokens carry no loss, since too many ids were left for them, says so once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.learner.reporting.beyond_kept import BeyondKept
from asyncrl.learner.reporting.step_report import StepReport
from tests.learner.reporting.test_no_signal import batch, episode
from tests.learner.tiny import tiny_config

HUNDRED = [episode(0, 0, 1.0, tokens=tuple(range(60))), episode(0, 1, 0.0, tokens=tuple(range(40)))]


@pytest.mark.parametrize(("beyond", "said"), [(0, False), (1, False), (2, True), (100, True)])
def test_more_than_one_in_a_hundred_is_said(beyond: int, said: bool) -> None:
    sentence = BeyondKept(256).note({"correction/beyond_max_kept": float(beyond)}, HUNDRED)
    assert bool(sentence) == said
    if said:
        assert f"{beyond} of the 100 policy tokens" in sentence
        assert "actors.max_kept = 256" in sentence


def test_it_is_said_once_and_not_without_truncation() -> None:
    judge = BeyondKept(8)
    assert judge.note({}, HUNDRED) == ""
    many = {"correction/beyond_max_kept": 50.0}
    assert [bool(judge.note(many, HUNDRED)) for _ in range(3)] == [True, False, False]


def test_the_learner_warns_and_reports_an_event(caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    reporter = SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields)))
    session: Any = SimpleNamespace(config=tiny_config(), reporter=reporter, version=7)
    report = StepReport(session, SimpleNamespace())  # type: ignore[arg-type]
    for _ in range(2):
        report.judge(batch((0.0, 1.0)), {"correction/beyond_max_kept": 4.0})
    ((kind, fields),) = events
    assert (kind, fields["step"]) == ("beyond_max_kept", 7)
    assert fields["why"].startswith("4 of the 8 policy tokens")
    assert fields["why"] in caplog.text
    report.judge([], {})
