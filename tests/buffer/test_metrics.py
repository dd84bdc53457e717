"""What the buffer reports is in the table of series: what is not would be left out."""

from __future__ import annotations

from pathlib import Path

from asyncrl.buffer.metrics import series
from asyncrl.tracking.series import check
from tests.buffer.fakes import learner, open_buffer, put, trajectory


def test_every_value_is_in_the_table(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    for ticket in buffer.issue(0.0, "actor-0", (0, 0), 4)[0]:
        put(buffer, trajectory(ticket, (0, 0)))
    values = series(buffer, {"late_tokens": 1}, 0.1)
    check(values)
    assert values["throughput/tokens_wasted/late"] == 1
