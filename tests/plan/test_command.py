"""`asyncrl plan` on a recorded folder, and on folders from which nothing can be planned: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.buffer.rules import Rules
from asyncrl.cli.dispatch import main
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.report import pareto
from tests.plan.recording import record

CONFIG: dict[str, Any] = {
    "actors": {"count": 2, "slots": 6}, "learner": {"groups_per_step": 3, "group_size": 2, "steps": 1000},
    "buffer": {"max_staleness": 2, "capacity": 64, "keep": "all", "lease_s": 1e6}, "eval": {"tasks": 0},
}  # fmt: skip


def recorded(folder: Path, *, steps: int, measures: bool = True) -> RunFolder:
    config = Config.model_validate(CONFIG)
    run = RunFolder.create(folder / "run", config)
    record(run.path, Rules.of(config), actors=2, slots=6, steps=steps, seed=0, measures=measures)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    made = recorded(tmp_path_factory.mktemp("plan"), steps=30)
    yield made
    made.remove_temporary()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_a_plan_has_a_table_a_verdict_and_lines_to_paste(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.yaml"
    words = ("--try-max-staleness", "0", "1", "2", "4", "--try-actors", "2", "4", "--steps", "8", "--seeds", "2")
    code, out, err = said(capsys, str(run.path), *words, "--write", str(new), "--cores", "64")
    assert (code, err) == (0, "")
    for words_said in ("fitted to", "tokens/s", "recorded", "slower side", "synchronous training", "how sure"):
        assert words_said in out
    drawn = pareto.read(run.plan)
    assert drawn is not None
    assert len(drawn.points) >= 8
    assert {"recorded", "pick"} <= drawn.named.keys()
    assert set(drawn.front) <= set(drawn.points)
    Config.load(new)
    written = yaml.safe_load(new.read_text())
    assert written["learner"]["groups_per_step"] == 3
    code, _, err = said(capsys, str(run.path), "--write", str(new))
    assert (code, "exists" in err) == (2, True)


def test_after_a_probe_the_written_file_is_the_users_configuration(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe's own evaluates nothing and keeps all payloads."""
    monkeypatch.setattr("asyncrl.plan.probe.probe", lambda config, seconds: run)
    monkeypatch.setattr("asyncrl.launch.preflight.check", lambda config: None)
    own = CONFIG | {"eval": {"tasks": 7, "every": 5}, "buffer": CONFIG["buffer"] | {"keep": "needed"}}
    given, new = tmp_path / "own.yaml", tmp_path / "new.yaml"
    given.write_text(yaml.safe_dump(own))
    words = ("--probe", "1", "--try-max-staleness", "0", "4", "--steps", "4", "--seeds", "1", "--write", str(new))
    code, out, err = said(capsys, "--config", str(given), *words)
    assert (code, err) == (0, "")
    written = Config.load(new)
    assert (written.eval.tasks, written.eval.every, written.buffer.keep) == (7, 5, "needed")
    assert "your configuration with these lines" in out
    assert written.buffer.max_staleness in (0, 2, 4)


def test_as_json_it_has_every_point(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--try-max-staleness", "0", "2", "--steps", "6", "--seeds", "1", "--json")
    code, out, _ = said(capsys, str(run.path), *words)
    found = json.loads(out)
    assert code == 0
    assert [p["setting"]["max_staleness"] for p in found["points"]] == [2, 0]
    assert found["points"][1]["mean"]["staleness_mean"] == 0.0
    assert found["recorded"]["mean"]["step_s"] == pytest.approx(found["measured"]["step_s"], rel=0.4)


def test_actors_that_joined_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration says two, and a third one was added."""
    config = Config.model_validate(CONFIG)
    made = RunFolder.create(tmp_path / "run", config)
    try:
        record(made.path, Rules.of(config), actors=3, slots=6, steps=14, seed=0)
        _, out, _ = said(capsys, str(made.path), "--try-max-staleness", "2", "--steps", "4", "--seeds", "1", "--json")
        assert json.loads(out)["recorded"]["setting"]["actors"] == 3
    finally:
        made.remove_temporary()


def test_a_tuned_run_is_played_tuned_and_compared_with_fixed_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = CONFIG | {
        "actors": {"count": 2, "max_slots": 12}, "launch": {"tuning": "auto"},
        "buffer": {"staleness_limit": 4, "capacity": 64, "keep": "all", "lease_s": 1e6},
    }  # fmt: skip
    config = Config.model_validate(sections)
    made = RunFolder.create(tmp_path / "run", config)
    try:
        record(made.path, Rules.of(config), actors=2, slots=6, steps=14, seed=0)
        words = ("--try-max-staleness", "0", "2", "--steps", "6", "--seeds", "1")
        code, out, err = said(capsys, str(made.path), *words, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["recorded"]["setting"]["tuning"] == "auto"
        assert [(p["setting"]["tuning"], p["setting"]["max_staleness"]) for p in found["points"]] == [
            ("auto", 4), ("off", 0), ("off", 2)
        ]  # fmt: skip
        assert found["points"][1]["mean"]["staleness_max"] == 0
        assert max(p["mean"]["staleness_max"] for p in found["points"]) > 0, "what the configuration says, and not 0"
        _, out, _ = said(capsys, str(made.path), *words)
        recorded_row = next(line for line in out.splitlines() if "recorded" in line and "auto" in line)
        assert recorded_row.split()[2:5:2] == ["auto", "auto"]
    finally:
        made.remove_temporary()


def test_tuning_and_ranks_are_tried_where_they_are_asked_for(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--steps", "6", "--seeds", "1", "--json")
    code, out, _ = said(capsys, str(run.path), "--try-tuning", "off", "auto", *words)
    found = json.loads(out)
    assert (code, [p["setting"]["tuning"] for p in found["points"]]) == (0, ["off", "auto"])
    code, _, err = said(capsys, str(run.path), "--gpus", "8", *words)
    assert (code, "an actor has 0 GPUs" in err) == (2, True)
    code, _, err = said(capsys, str(run.path), "--gpus", "8", "--try-ranks", "2", *words)
    assert (code, "leave out --try-actors and --try-ranks" in err) == (2, True)
    _, out, _ = said(capsys, str(run.path), "--try-ranks", "2", *words)
    assert [each["why"][:21] for each in json.loads(out)["refused"]] == ["learner.ranks is 2 bu"]


def test_a_setting_that_the_config_refuses_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--try-max-staleness", "0", "--try-every", "1", "2", "--steps", "6", "--seeds", "1")
    code, out, _ = said(capsys, str(run.path), *words)
    assert code == 0
    assert "not played: " in out
    assert "weights.every" in out


@pytest.mark.parametrize("what", ["no run", "few steps", "no times", "damaged", "no such value"])
def test_what_cannot_be_planned_from_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: RunFolder, what: str
) -> None:
    words = ["--seeds", "1"]
    match what:
        case "no run":
            made, expected = RunFolder(tmp_path), "holds no run"
        case "few steps":
            made, expected = recorded(tmp_path, steps=5), "has finished 5 training steps, and plan needs at least 8"
        case "no times":
            made, expected = recorded(tmp_path, steps=12, measures=False), "actors.engine 'hf'"
        case "damaged":
            made, expected = recorded(tmp_path, steps=12), "cannot be read"
            for suffix in ("-wal", "-shm"):
                (made.buffer / f"ledger.sqlite{suffix}").unlink(missing_ok=True)
            (made.buffer / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 8192)
        case _:
            made, expected, words = run, "--try-slots is 0: expected 1 to 100000", ["--try-slots", "0"]
    code, out, err = said(capsys, str(made.path), *words)
    if made.path != tmp_path and made.path != run.path:
        made.remove_temporary()
    assert code in (1, 2)
    assert expected in err
    assert (out, err.count("\n")) == ("", 1)


def test_without_a_folder_it_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys)
    assert code == 2
    assert "takes a run folder, or --config FILE --probe SECONDS" in err


def test_a_configuration_is_probed_first(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []

    def probed(config: Config, seconds: float) -> RunFolder:
        asked.append((config.actors.count, seconds))
        return run

    monkeypatch.setattr("asyncrl.plan.probe.probe", probed)
    words = ("--config", "quickstart", "--probe", "7", "--actors.count", "3", "--try-actors", "1", "2")
    code, out, _ = said(capsys, *words, "--json", "--steps", "4", "--seeds", "1")
    assert (code, asked) == (0, [(3, 7.0)])
    assert [p["setting"]["actors"] for p in json.loads(out)["points"]] == [2, 1]
    code, _, err = said(capsys, "--config", "quickstart", "--probe", "0")
    assert (code, "expected more than 0" in err) == (2, True)
