"""A run that ends by the results of its evaluations, with the real processes: killed during one, stopped by patience,
its best weights kept, and a set played with these behind the end."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import gather
from asyncrl.config.held_out import for_set
from asyncrl.evaluation import play_held_out, with_model
from asyncrl.launch.diagnosis.waits import why
from tests.launched import launched
from tests.test_evaluation_in_the_run import CONFIG, RESTART_S, newest_open
from tests.waiting import until


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_run_killed_during_an_evaluation_stops_keeps_its_best_weights_and_plays_the_final_set(tmp_path: Path) -> None:
    sections = {name: dict(values) for name, values in CONFIG.items()}
    sections["learner"] |= {"steps": 1000, "keep_checkpoints": 2}
    sections["eval"] = {
        "every": 1, "patience": {"dev": 2}, "keep_best": "dev", "final": "test",
        "sets": {"dev": {"tasks": 3}, "test": {"tasks": 2, "samples": 2}},
    }  # fmt: skip
    sections["launch"] |= {"restarts": 10}
    with launched(tmp_path, sections) as it:
        run = it.run
        assert until(lambda: newest_open(run) > 1, RESTART_S), it.said
        it.kill("learner")
        assert it.launcher.wait(600) == 0, it.said
    config, summary = run.load_config(), json.loads(run.summary.read_text())
    with closing(PayloadFiles(run.buffer / "payloads")) as payloads:
        assert list(violations(gather(run, config, payloads))) == []
    ledger = read_ledger(run.buffer)
    assert {row["name"] for row in ledger.tables["evals"]} == {"dev"}, "the final set is played behind the end only"
    (stop,) = (row for row in ledger.tables["stops"] if not row["released"])
    assert summary["why"] == stop["why"]
    assert "(eval.patience)" in stop["why"]
    assert why(run) == [f"the run is over: finished: {stop['why']}"]
    said, report = it.out.read_text(), run.report.read_text()
    assert all("used for choosing" in text for text in (said, report))
    assert "why it ended" in said
    assert "has not exceeded" in report
    final = json.loads(run.final.read_text())
    assert (final["set"], final["greedy"]["all"]["tasks"]) == ("test", 2)
    best = summary["best"]
    assert [path.name for path in run.exports.glob("step-*") if path.name == best["export"]]
    shares = {
        (row["branch"], row["due"]): measure["share"]
        for row in ledger.tables["evals"]
        for measure in ledger.tables["eval_measures"]
        if measure["serial"] == row["serial"] and measure["way"] == "sampled"
    }
    assert best["success"] == shares[best["branch"], best["version"]]
    (serial,) = (
        row["serial"]
        for row in ledger.tables["evals"]
        if (row["branch"], row["due"], row["state"]) == (best["branch"], best["version"], "done")
    )
    greedy = [
        (row["task_id"], row["reward"])
        for row in ledger.tables["eval_results"]
        if row["serial"] == serial and row["greedy"]
    ]
    again = for_set(with_model(config, run.exports / best["export"]), "dev")
    _, replayed = asyncio.run(play_held_out(again, run.exports / best["export"], Console(file=io.StringIO())))
    assert [(p.trajectory.task_id, p.trajectory.reward) for p in replayed if p.trajectory] == greedy
