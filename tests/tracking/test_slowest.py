from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.tracking.report.report import page
from asyncrl.tracking.sinks import jsonl
from asyncrl.tracking.slowest import environments, slowest, tools

RECORD = {
    "throughput/environment_episodes/shop": 10.0,
    "throughput/environment_s/shop": 30.0,
    "throughput/environment_episodes/web": 10.0,
    "throughput/environment_s/web": 70.0,
    "throughput/tool_calls/buy": 20.0,
    "throughput/tool_s/buy": 5.0,
    "throughput/tool_calls/search": 20.0,
    "throughput/tool_s/search": 50.0,
}


def test_the_slowest_come_first() -> None:
    assert [(used.name, used.mean_s) for used in environments(RECORD)] == [("web", 7.0), ("shop", 3.0)]
    assert [(used.name, used.mean_s) for used in tools(RECORD)] == [("search", 2.5), ("buy", 0.25)]
    said = "an episode spends 7 s in environment web, 70% of the time in all 2; tool search: 2.5 s a call, 50%"
    assert slowest(RECORD).startswith(said)
    assert slowest({}) == ""


def test_the_report_ranks_them_and_escapes_their_names() -> None:
    hostile = {"throughput/tool_calls/<b>": 1.0, "throughput/tool_s/<b>": 1.0}
    text = page("r", [{"step": 1.0, "wall_s": 1.0, **RECORD, **hostile}], {})
    assert text.index("environment web") < text.index("environment shop") < text.index("tool search")
    assert "tool &lt;b&gt;" in text
    assert "<b>1" not in text.split("Where the time of episodes goes")[1]


def test_the_newest_values_are_read_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert jsonl.newest(metrics) == {}
    lines = [json.dumps({"step": step, f"only/{step}": 1}) for step in range(20000)]
    metrics.write_text("\n".join(lines) + '\n{"step": 99')
    newest = jsonl.newest(metrics)
    assert newest["step"] == 19999
    assert "only/0" not in newest
    metrics.write_text('{"step": 1}\n[]\n')
    with pytest.raises(ValueError, match="near its end: not numbers by name"):
        jsonl.newest(metrics)
