"""What an actor says that it waits for: one cause for each state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.status import Status


def cause(*phases: str, loading: bool = False, silent: bool = False, putting: int = 0) -> tuple[str | None, str]:
    sent: list[tuple[str | None, str]] = []
    playing = {i: SimpleNamespace(progress=SimpleNamespace(phase=phase)) for i, phase in enumerate(phases)}
    tickets: Any = SimpleNamespace(playing=playing, putting=range(putting), calls=SimpleNamespace(silent=silent))
    reporter = SimpleNamespace(waiting=lambda cause, on: sent.append((cause, on)))
    updates, keeper = SimpleNamespace(loading=loading), SimpleNamespace(failed_rounds=0)
    components: Any = SimpleNamespace(engine=None, updates=updates, reporter=reporter, keeper=keeper)
    concurrency: Any = None
    status = Status("lookup", components, tickets, concurrency)
    status.no_ticket = "admission"
    status.report()
    return sent[0]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (cause("generate", loading=True), ("weights", "")),
        (cause("environment", "generate", silent=True), (None, "")),
        (cause("environment", silent=True), ("buffer", "buffer")),
        (cause("environment", putting=1), ("environment", "lookup")),
        (cause(putting=1), ("put", "buffer")),
        (cause(), ("ticket", "buffer: admission")),
    ],
)
def test_the_cause_is_the_first_that_holds(state: tuple[str | None, str], expected: tuple[str | None, str]) -> None:
    assert state == expected
