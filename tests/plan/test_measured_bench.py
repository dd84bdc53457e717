"""scripts/bench/plan_grid.py and auto_measured.py: what they run, go on with, and make of it. No run is made here."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.buffer.bounds.automatic import Auto
from asyncrl.buffer.bounds.slots import SlotLimits
from asyncrl.config import Config
from tests.scripts import FOLDER, script

QUICKSTART = FOLDER.parent / "configs" / "quickstart.yaml"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER / "bench"))
    return lambda name: script(f"bench/{name}.py")


def records(count: int, tokens_per_step: float, step_s: float = 1.0, **series: float) -> list[dict[str, float]]:
    steps = range(1, count + 1)
    own = {"staleness/mean": 0.5} | series
    return [{"step": n, "wall_s": 5 + n * step_s, "tokens": n * tokens_per_step} | own for n in steps]


# Runs


@pytest.fixture
def fake_asyncrl(bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`asyncrl launch`, but for the work: two records at once, the third while it goes on, and then `end`."""

    def launched(end: str, enough: Any = None) -> Any:
        launching = bench("launching")
        run = tmp_path / "run"
        lines = "\\n".join(json.dumps({"step": n}) for n in (1, 2))
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\nmkdir -p {run}\nprintf '{lines}\\n{{' > {run}/metrics.jsonl\n{end}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return launching.launched(run, {"learner.steps": 2}, enough)

    return launched


def test_a_run_is_stopped_when_there_is_enough_of_it(fake_asyncrl: Callable) -> None:
    assert [record["step"] for record in fake_asyncrl("exec sleep 60", lambda found: len(found) == 2)] == [1, 2]


def test_a_run_without_such_an_end_is_let_run_and_one_that_fails_is_named(fake_asyncrl: Callable) -> None:
    assert [record["step"] for record in fake_asyncrl("exit 0")] == [1, 2]
    with pytest.raises(SystemExit, match=r"run ended by itself, with exit code 3: see .*run.log"):
        fake_asyncrl("exit 3")
    with pytest.raises(SystemExit, match="exit code 0"):
        fake_asyncrl("exit 0", lambda found: len(found) > 2)


# The grid


@pytest.fixture
def grid(bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose runs have a rate by their setting; the plan picks 24 slots and bound 2."""
    module = bench("plan_grid")

    def launched(run: Path, flags: Mapping[str, Any], enough: Any) -> Any:
        module.made.append(flags)
        if len(module.made) == module.stops_at:
            raise KeyboardInterrupt
        found = records(30, 100.0 + flags["actors.slots"] + 10 * flags["buffer.max_staleness"] + flags["launch.seed"])
        assert enough(found), "it is not stopped before"
        return found

    def planned(workload: Any, name: str, args: Any) -> dict[str, Any]:
        points = [{"setting": list(s), "tokens_per_s": 100.0, "staleness": 1.0} for s in workload.settings]
        return {"pick": list(workload.middle), "points": points, "recorded": {}}

    def run(*flags: str, stops_at: int | None = None) -> Any:
        module.made, module.stops_at = [], stops_at
        monkeypatch.setattr(module, "launched", launched)
        monkeypatch.setattr(module, "planned", planned)
        monkeypatch.setattr(sys, "argv", ["plan_grid.py", "--out", str(tmp_path / "grid.json"), *flags])
        module.main()
        return json.loads((tmp_path / "grid.json").read_text())

    module.run = run
    return module


def test_all_nine_are_measured_three_times_each_repeat_in_its_own_order(grid: Any) -> None:
    rows = grid.run()["rows"]
    places = [(row["workload"], tuple(row["setting"])) for row in rows]
    assert set(Counter(places).values()) == {3}
    assert len(rows) == 54
    orders = [places[n : n + 18] for n in (0, 18, 36)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(set(order) == set(orders[0]) for order in orders), "a repeat is whole before the next one begins"
    assert [flags["launch.seed"] for flags in grid.made] == [row["repeat"] for row in rows]


def test_what_an_interrupted_grid_has_is_not_run_again(grid: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        grid.run(stops_at=21)
    assert len(grid.run("--resume")["rows"]) == 54
    assert len(grid.made) == 54 - 20
    with pytest.raises(KeyboardInterrupt):
        grid.run(stops_at=2)
    with pytest.raises(SystemExit, match="give the same, or begin anew"):
        grid.run("--resume", "--seconds", "5")


def test_the_pick_is_compared_with_the_best_by_medians(grid: Any, capsys: pytest.CaptureFixture[str]) -> None:
    grid.run("--workloads", "sleeping tools")
    said = capsys.readouterr().out
    # Seeds 0, 1, 2: the rates are 100 + slots + 10 * bound + seed.
    assert "| 48 | 8 | 100 | 229 (228 to 230) | 1.00 | 0.50 | best |" in said
    assert "| 24 | 2 | 100 | 145 (144 to 146) | 1.00 | 0.50 | pick |" in said
    assert f"the pick, slots 24 and bound 2, has {145 / 229:.1%} of the best's tokens/s" in said


def test_the_first_seconds_and_the_first_step_do_not_count(grid: Any) -> None:
    def enough(count: int, step_s: float) -> bool:
        return bool(grid._enough(records(count, 1.0, step_s), 4.0, 12.0, 3))

    assert not grid._enough([], 4.0, 12.0, 3)
    assert not enough(16, 1.0)  # 4 s are left out, 11 s are there
    assert enough(17, 1.0)
    assert not enough(4, 8.0)  # 16 s, but two steps
    assert enough(5, 8.0)


def test_every_setting_of_the_grid_is_one_that_the_config_takes(grid: Any) -> None:
    for workload in grid.WORKLOADS.values():
        assert len(set(workload.settings)) == 9
        assert workload.middle in workload.settings
        configs = [Config.load(QUICKSTART, workload.flags(setting, 3)) for setting in workload.settings]
        assert [(c.actors.slots, c.buffer.max_staleness) for c in configs] == workload.settings
        assert {c.launch.seed for c in configs} == {3}


# Automatic settings


@pytest.fixture
def auto(bench: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, whose runs have 1000 tokens/s with a fixed bound and 970 with an automatic one."""
    module = bench("auto_measured")

    def measured(flags: Mapping[str, Any]) -> dict[str, Any]:
        module.made.append((flags.get("buffer.max_staleness"), flags["launch.seed"]))
        if len(module.made) == module.stops_at:
            raise KeyboardInterrupt
        tokens = 97.0 if flags["buffer.max_staleness"] == "auto" else 90.0 + flags["buffer.max_staleness"] + 2
        row = module.from_records(records(60, tokens, 0.1, **{"staleness/bound": 4}))
        return row | {"success": 0.8 + flags["launch.seed"] / 100, "load": 1.0}

    def run(*flags: str, stops_at: int | None = None) -> None:
        module.made, module.stops_at = [], stops_at
        monkeypatch.setattr(module, "measured", measured)
        monkeypatch.setattr(sys, "argv", ["auto_measured.py", "--results", str(tmp_path), *flags])
        module.main()

    module.run = run
    return module


def test_the_fixed_pair_is_chosen_on_another_seed_before_anything_is_compared(auto: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="choose the fixed pair first"):
        auto.run()
    auto.run("--choose")
    assert {seed for _, seed in auto.made} == {100}
    assert json.loads((tmp_path / "auto_chosen.json").read_text())["best"] == [32, 8]


def test_arms_are_interleaved_and_what_is_there_is_not_run_again(auto: Any, tmp_path: Path) -> None:
    auto.run("--choose")
    with pytest.raises(KeyboardInterrupt):
        auto.run(stops_at=6)
    auto.run("--resume")
    assert len(auto.made) == 10
    rows = json.loads((tmp_path / "auto_measured.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [seed for seed in range(5) for _ in range(3)]
    assert len({tuple(row["arm"] for row in rows[n : n + 3]) for n in range(0, 15, 3)}) == 3
    (tmp_path / "auto_measured.json").rename(tmp_path / "auto_measured.part.json")
    with pytest.raises(SystemExit, match="begin anew"):
        auto.run("--resume", "--steps", "70")


def test_an_arm_is_compared_with_the_fixed_pair_of_its_seed(auto: Any, capsys: pytest.CaptureFixture[str]) -> None:
    auto.run("--choose")
    capsys.readouterr()
    auto.run()
    said = capsys.readouterr().out
    assert "| fixed | 5 | 1000 | 100.0%, 100.0% | 0.50 | 4 to 4 |  | 0.820, 0.800 to 0.840 |" in said
    assert "| bound auto | 5 | 970 | 97.0%, 97.0% | 0.50 |" in said
    assert "bound auto: mean success 0.820, within the interval of the fixed pair, 0.800 to 0.840" in said


def test_a_success_outside_of_the_interval_is_called_that(auto: Any) -> None:
    rows = [{"arm": "fixed", "success": value} for value in (0.8, 0.81, 0.82)] + [{"arm": "other", "success": 0.6}]
    assert auto.verdicts(rows)[-1] == (
        "other: mean success 0.600, outside the interval of the fixed pair, 0.785 to 0.835"
    )


def test_the_first_twenty_steps_do_not_count(auto: Any) -> None:
    found = records(60, 100.0)
    for record in found[20:]:
        record["tokens"] += 100.0 * (record["step"] - 20)  # twice as fast from there on
    found[-1]["wall_s"] += 50.0  # the evaluation
    row = auto.from_records(found)
    assert (row["tokens_per_s"], row["step_s"], row["first_tokens_per_s"]) == (200.0, 1.0, 100.0)
    assert row["bounds"] is None


def test_the_arms_are_what_their_names_say(auto: Any) -> None:
    configs = {
        name: Config.load(QUICKSTART, {**auto.SMALL, **flags}) for name, flags in auto.arms(slots=64, bound=8).items()
    }
    limits = {name: (Auto.of(config), SlotLimits.of(config)) for name, config in configs.items()}
    assert limits["fixed"] == (None, None)
    bound, slots = limits["bound auto"]
    assert bound is not None
    assert (bound.start, slots, configs["bound auto"].actors.slots) == (1, None, 64)
    bound, slots = limits["slots and bound auto"]
    assert bound is not None
    assert slots is not None
    assert (bound.start, slots.start) == (1, 16)
    assert (16, 1) in auto.PAIRS, "what it begins with is measured, too"
    for pair in auto.PAIRS:
        Config.load(QUICKSTART, {**auto.SMALL, **auto.fixed(*pair)})
