"""The line of advice is said where the record supports it, and not otherwise."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.config import Config
from asyncrl.launch.diagnosis import waits
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.advice import FEWEST, SETTLE, advice
from asyncrl.tracking.report.report import page
from asyncrl.tracking.state import Record
from asyncrl.tracking.terminal.live import end


def records(count: int = 20, *, drops: float = 0.0, actors: int = 1, **values: float) -> list[Record]:
    """Steps of a run; `drops`: stale groups per trained one."""
    of_step = {
        "throughput/step_s": 2.0, "throughput/slots_busy": 0.98, "waits/learner/batch": 0.81, "staleness/bound": 2.0,
        "system/cpu/learner": 0.2, **{f"system/cpu/actor-{n}": 0.5 for n in range(actors)},
    }  # fmt: skip
    of_step |= {name.replace("__", "/"): value for name, value in values.items()}
    counts = (
        {"buffer/groups/trained": 10.0 * n, "buffer/dropped/stale": 10.0 * n * drops} for n in range(1, count + 1)
    )
    return [{"step": float(n), "wall_s": 2.0 * n} | groups | of_step for n, groups in enumerate(counts, 1)]


def test_generation_is_slower() -> None:
    assert advice(records(), 16) == "generation is the slower side by 5.3x: a second actor gives at most +100%"
    assert advice(records(actors=2), None).endswith("a third actor gives at most +50%")


def test_another_actor_gives_no_more_than_the_learner_takes_or_free_cores_allow() -> None:
    assert advice(records(waits__learner__batch=0.3), 16).endswith("a second actor gives at most +43%")
    assert advice(records(), 1).endswith("+60%"), "0.3 of a core is free, and an actor takes 0.5"
    assert "no core is free for another actor" in advice(records(system__cpu__learner=0.49), 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"waits__learner__batch": 0.01, "throughput__slots_busy": 0.5}, "training is the slower side by 2.0x"),
        ({"throughput__slots_busy": 0.6, "staleness__bound": 0.0}, "raise buffer.max_staleness to 1"),
        ({"drops": 0.25}, "20% of the groups are dropped as stale; raise buffer.max_staleness to 3"),
    ],
)
def test_the_other_findings(values: dict[str, Any], words: str) -> None:
    assert words in advice(records(**values), None)


def test_nothing_is_said_of_a_balanced_run_or_too_few_steps() -> None:
    assert advice(records(waits__learner__batch=0.1, throughput__slots_busy=0.9), 16) == ""
    assert advice(records(SETTLE + FEWEST - 1), 16) == ""
    assert advice(records(SETTLE + FEWEST), 16) != ""
    assert advice([], 16) == ""


def test_nothing_is_said_where_the_halves_differ() -> None:
    changed = records()[:12] + records(waits__learner__batch=0.0)[12:]
    assert advice(changed, 16) == ""


def test_nothing_is_said_where_no_groups_are_trained() -> None:
    """Under learner.loss sft slots are busy in evaluations only, and nobody waits for anybody."""
    supervised = records(waits__learner__batch=0.0, throughput__slots_busy=0.0)
    assert "training is the slower side" in advice(supervised, 16)
    for record in supervised:
        record["buffer/groups/trained"] = 0.0
    assert advice(supervised, 16) == ""


def test_a_record_without_the_series_says_nothing() -> None:
    assert advice([{"step": float(n), "throughput/step_s": 1.0} for n in range(30)], 16) == ""


def test_why_of_a_run_that_is_over_ends_with_it(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config.model_validate({}))
    try:
        run.summary.write_text(json.dumps({"outcome": "finished"}))
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records()))
        lines = waits.why(run)
        assert lines[0] == "the run is over: finished"
        assert lines[-1].startswith("generation is the slower side by 5.3x")
        run.metrics.write_text("no metrics\n")
        assert waits.why(run) == lines[:1], "it is answered without them"
    finally:
        run.remove_temporary()


def test_the_report_and_the_end_on_the_terminal_show_it() -> None:
    assert "generation is the slower side by 5.3x" in page("run", records(), {})
    assert "slower side" not in page("run", records(5), {})
    console = Console(width=160, record=True, file=io.StringIO())
    summary = {
        "steps": 20, "wall_s": 40.0, "tokens_generated": 1, "tokens_trained": 1, "tokens_generated_per_s": 1.0,
        "tokens_trained_per_s": 1.0, "max_staleness_seen": 1,
    }  # fmt: skip
    console.print(end(summary, Path("run"), advice(records(), 16)))
    assert "advice" in (shown := console.export_text())
    assert "a second actor gives at most" in shown
