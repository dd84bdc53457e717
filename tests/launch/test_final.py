"""What is played behind the end of a run (`eval.final`), and what the end is called when it cannot be."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.launch import final
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report.chosen import chosen, sentences

EVAL: dict[str, Any] = {
    "every": 1, "keep_best": "dev", "final": "test", "sets": {"dev": {"tasks": 2}, "test": {"tasks": 5, "samples": 2}},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = Config.model_validate({"eval": EVAL, "actors": {"slots": 4, "episode_s": 10.0}, "env": {"retries": 1}})
    return RunFolder.create(tmp_path / "run", config)


def with_best(run: RunFolder) -> None:
    (run.exports / "step-000003" / "hf").mkdir(parents=True)
    about = {"export": "step-000003", "branch": 0, "version": 3, "keep_best": "dev", "success": 0.5}
    (run.exports / "best.json").write_text(json.dumps(about))


def test_without_a_best_export_the_run_fails_and_says_what_is_missing(run: RunFolder) -> None:
    config = run.load_config()
    run.final.write_text("{}")
    ended = final.play(run, config, lambda: False, lambda s: None)
    assert (ended.kind, ended.exit_code) == ("failed", 1)
    assert "no evaluation of dev on the line of history has an export" in ended.why
    assert not run.final.exists(), "the figures of an earlier end"
    with_best(run)
    (run.exports / "step-000003" / "hf").rmdir()
    ended = final.play(run, config, lambda: False, lambda s: None)
    assert "step-000003, is missing: a --resume from before its step writes it again" in ended.why


@pytest.mark.system
@pytest.mark.system
def test_the_set_is_played_by_the_command_and_its_failure_names_it(run: RunFolder) -> None:
    """The export holds no model here: the command's own sentence is given."""
    with_best(run)
    config = run.load_config()
    ended = final.play(run, config, lambda: False, time.sleep)
    assert ended.kind == "failed"
    assert "no config.json in it or in its hf/" in ended.why
    by_hand = f"by hand: asyncrl eval --config {run.config} --checkpoint {run.exports}/step-000003 --set test --out"
    assert by_hand in ended.why
    longest_s = config.actors.most_episode_s
    assert final.deadline_s(config) == config.launch.start_s + 4 * 2 * longest_s, "15 episodes in 4 slots, each twice"


def test_an_interrupt_ends_it(run: RunFolder) -> None:
    with_best(run)
    ended = final.play(run, run.load_config(), lambda: True, time.sleep)
    assert (ended.kind, ended.exit_code) == ("interrupted", 130)


def test_the_summary_says_which_sets_were_used_for_choosing(run: RunFolder) -> None:
    with_best(run)
    figures = {"share": 0.25, "low": 0.1, "high": 0.5}
    run.final.write_text(json.dumps({"checkpoint": "x", "set": "test", "greedy": {"all": figures}}))
    said = dict(sentences(chosen(run, run.load_config())))
    assert said["used for choosing"].startswith("dev (eval.keep_best)")
    assert said["best weights"] == "version 3, dev 50.0%: exports/step-000003/hf"
    assert said["final"] == "test with the best weights: greedy 25.0% (10.0% to 50.0%)"
    assert chosen(run, Config()) == {}


def test_the_summary_says_why_the_final_set_was_not_played_with_better_weights(run: RunFolder) -> None:
    with_best(run)
    about = json.loads((run.exports / "best.json").read_text())
    top = {"branch": 0, "version": 2, "success": 0.75}
    (run.exports / "best.json").write_text(json.dumps(about | {"without_export": top}))
    run.final.write_text(json.dumps({"checkpoint": "x", "set": "test"}))
    said = dict(sentences(chosen(run, run.load_config())))
    assert "exports/step-000003/hf; version 2 of branch 0 had 75.0% and has no export: " in said["best weights"]
    assert said["final"].startswith("test with the best weights that have an export: ")
