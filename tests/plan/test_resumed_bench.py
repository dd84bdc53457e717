"""scripts/bench/plan.py --resume goes on with what an interrupted measurement has left. Nothing is run here."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from tests.scripts import script

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
bench = script("bench/plan.py")
COUNT = len(yaml.safe_load((BENCH / "plan_configurations.yaml").read_text())["configurations"])


class FakeMeasuring:
    """Measures nothing, and is interrupted before one place."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.stops_at, self.places, self.bases = stops_at, [], []  # type: ignore[var-annotated]

    def launched(self, name: str, *_: Any) -> Path:
        self.bases.append(name)
        return Path(name)

    def compared(self, place: int, configuration: Any, *_: Any) -> dict[str, Any]:
        if place == self.stops_at:
            raise KeyboardInterrupt
        self.places.append(place)
        pairs = {"step_s": (1.0, 1.0), "staleness": (1.0, 1.0), "dropped": (0.0, 0.0)}
        return {"place": place, "configuration": configuration, "predicted_measured": pairs}


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, fake: FakeMeasuring, *flags: str) -> FakeMeasuring:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setattr(sys, "argv", ["plan.py", "--out", str(out), *flags])
    monkeypatch.setattr(bench, "launched", fake.launched)
    monkeypatch.setattr(bench, "compared", fake.compared)
    monkeypatch.setattr(bench, "fit_of", lambda run: run)
    monkeypatch.setattr(bench, "WORK", out.parent / "work")
    bench.main()
    return fake


def test_only_what_is_left_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(KeyboardInterrupt):
        measured(monkeypatch, out, FakeMeasuring(stops_at=5))
    assert not out.exists()
    again = measured(monkeypatch, out, FakeMeasuring(), "--resume")
    assert again.places == list(range(5, COUNT))
    assert [row["place"] for row in json.loads(out.read_text())["rows"]] == list(range(COUNT))


def test_a_row_of_another_configuration_is_measured_again_and_other_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(KeyboardInterrupt):
        measured(monkeypatch, out, FakeMeasuring(stops_at=5))
    part = tmp_path / "plan.part.json"
    found = json.loads(part.read_text())
    found["rows"][2]["configuration"] = {"base": "another"}
    part.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="give the same, or begin anew"):
        measured(monkeypatch, out, FakeMeasuring(), "--resume", "--steps", "7")
    assert measured(monkeypatch, out, FakeMeasuring(), "--resume").places == [2, *range(5, COUNT)]


def test_a_base_that_has_ended_with_the_same_configuration_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "WORK", tmp_path)
    changes = {"actors.slots": 7}
    assert bench.ended("base-x", changes, 40, 100) is None
    flags = bench._flags("base-x", changes, 40, 100)
    run = RunFolder.create(tmp_path / "base-x", Config.load("quickstart", flags))
    assert bench.ended("base-x", changes, 40, 100) is None, "it has no summary: it was interrupted"
    (run.path / "summary.json").write_text("{}")
    assert bench.ended("base-x", changes, 40, 100) == run.path
    assert bench.ended("base-x", changes, 41, 100) is None
    assert bench.ended("base-x", changes | {"actors.slots": 8}, 40, 100) is None
    run.remove_temporary()


def test_a_prediction_is_made_again_for_a_run_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WORK", tmp_path)
    monkeypatch.setattr(bench, "launched", lambda name, *_: tmp_path / f"new-{name}")
    again, anew = (Namespace(steps=40, resume=False, again=again) for again in (True, False))
    run = RunFolder.create(tmp_path / "measured-3", Config.load("quickstart", bench._flags("measured-3", {}, 40, 0)))
    (run.path / "summary.json").write_text("{}")
    assert bench.made("measured-3", {}, again, 0) == run.path
    assert bench.made("measured-3", {}, anew, 0) == tmp_path / "new-measured-3"
    assert bench.made("measured-4", {}, again, 0) == tmp_path / "new-measured-4"
    run.remove_temporary()


def test_a_play_that_got_stuck_is_named_beside_its_numbers() -> None:
    row = {"place": 3, "configuration": {}, "predicted_measured": {"step_s": (9e5, 2.0)}}
    assert "stuck" not in bench._line(row)
    assert bench._line(row | {"stuck": "0 of 8 groups"}).endswith("the play got stuck: 0 of 8 groups")
