"""The core of the learning tables (scripts/bench/learning): rows are kept and not made twice, and say what they say."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.trajectory import TicketId
from tests.buffer.fakes import trajectory

BENCH = Path(__file__).parents[1] / "scripts" / "bench"
TABLES = ("credit", "replay", "default_at_8", "decoupled", "lr_law", "time_to", "distillation", "distillation_lag")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the core by their names."""
    monkeypatch.syspath_prepend(str(BENCH))
    import learning.command
    import learning.declared
    import learning.launched
    import learning.loop
    import learning.measures
    import learning.report
    import learning.rows

    return SimpleNamespace(**{name: getattr(learning, name) for name in vars(learning) if not name.startswith("_")})


def curve(*successes: float, tokens: int = 10) -> dict:
    points = [{"success": s, "tokens": tokens * (i + 1), "s": 2.0 * i} for i, s in enumerate(successes)]
    return {"curve": points, "held_out": successes[-1]}


def evaluated(held_out: dict[int, float]) -> dict:
    """A row whose held-out tasks were played after these steps, greedily 0.05 better."""
    points = [{"success": 0.0, "tokens": 10 * step, "cpu_s": step / 4} for step in range(1, max(held_out) + 1)]
    for step, share in held_out.items():
        points[step - 1] |= {"held_out": share, "greedy": share + 0.05}
    return {"curve": points}


# Rows on the disk


class FakeRuns:
    """Instead of a training: a line in a file for each run that was made, and success by its learning rate."""

    def __init__(self, folder: Path) -> None:
        self._made = folder / "made"
        self.fails_at: int | None = None

    def __call__(self, config: Config, lag: int) -> dict:
        with self._made.open("a") as file:
            file.write(f"{config.learner.lr:g} lag {lag} seed {config.learner.seed}\n")
        if len(self.made) == self.fails_at:
            os._exit(7)
        return curve(0.5, 100 * config.learner.lr + config.learner.seed / 10) | {"wall_s": 1.0, "cpu_s": 1.0}

    @property
    def made(self) -> list[str]:
        return self._made.read_text().splitlines() if self._made.exists() else []


@pytest.fixture
def runs(tmp_path: Path) -> FakeRuns:
    return FakeRuns(tmp_path)


@pytest.fixture
def table(core: SimpleNamespace, runs: FakeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    arm = core.declared.Arm
    return core.declared.Table(
        name="fake",
        question="Which?",
        tasks={"reversal": {"model.path": str(tmp_path / "model")}},
        arms=(
            arm("slow", {"learner.lr": 1e-3}, make=runs),
            arm("fast", {"learner.lr": 2e-3, "buffer.max_staleness": 4}, lag=4, make=runs),
        ),
        grid={"twice": {"learner.groups_per_step": 32}},
    )


@pytest.fixture
def command(core: SimpleNamespace, table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*flags: str, of=table) -> list[dict]:
        name = f"fake{'-tuning' if '--tune' in flags else ''}.json"
        monkeypatch.setattr(sys, "argv", ["fake.py", "--results", str(tmp_path / "results"), *flags])
        core.command.main(of)
        path = tmp_path / "results" / name
        return json.loads(path.read_text())["rows"] if path.exists() else []

    return run


def test_a_run_is_made_once_and_judged_on_seeds_0_to_4(command, runs: FakeRuns) -> None:
    rows = command()
    assert runs.made == [f"{rate} seed {seed}" for seed in range(5) for rate in ("0.001 lag 0", "0.002 lag 4")]
    assert command() == rows
    assert len(runs.made) == 10
    assert {"cpu", "cores", "python", "torch", "load"} <= rows[0]["machine"].keys()


def test_what_was_interrupted_goes_on_behind_the_last_row(command, runs: FakeRuns) -> None:
    runs.fails_at = 4
    with pytest.raises(RuntimeError, match=r"fast.*seed=1.*ended with code 7"):
        command()
    runs.fails_at = None
    assert len(command()) == 10
    assert len(runs.made) == 11, "three rows were there, and one run had died"


def test_a_row_of_other_settings_or_another_start_model_is_made_again(
    command, runs: FakeRuns, table, tmp_path: Path
) -> None:
    command("--seeds", "0")
    slow, fast = table.arms
    changed = replace(table, arms=(slow, replace(fast, values={**fast.values, "learner.lr": 3e-3})))
    command("--seeds", "0", of=changed)
    assert runs.made[2:] == ["0.003 lag 4 seed 0"]
    command("--seeds", "0", of=replace(changed, arms=(slow, replace(changed.arms[1], lag=2))))
    assert runs.made[3:] == ["0.003 lag 2 seed 0"]
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    command("--seeds", "0", "--arms", "slow", of=changed)
    assert runs.made[4:] == ["0.001 lag 0 seed 0"]


def test_a_command_may_end_after_some_rows(command, runs: FakeRuns) -> None:
    assert len(command("--most", "3")) == len(runs.made) == 3
    assert len(command("--most", "3")) == len(runs.made) == 6


def test_a_row_of_another_teacher_is_made_again(command, runs: FakeRuns, table, tmp_path: Path) -> None:
    weights = tmp_path / "teacher" / "model.safetensors"
    weights.parent.mkdir()
    (weights.parent / "config.json").write_text("{}")
    weights.write_bytes(b"teacher")
    taught = replace(table, arms=table.arms[:1], values={"learner.teacher.path": str(weights.parent)})
    for _ in range(2):
        command("--seeds", "0", of=taught)
    assert len(runs.made) == 1
    weights.write_bytes(b"another teacher")
    command("--seeds", "0", of=taught)
    assert len(runs.made) == 2


def test_tuning_tries_the_grid_on_other_seeds_and_in_another_file(command, runs: FakeRuns, capsys) -> None:
    rows = command("--tune", "--arms", "slow")
    assert [(row["arm"], row["seed"]) for row in rows] == [("slow, twice", seed) for seed in range(100, 105)]
    assert command("--report") == []
    assert "0 runs" in capsys.readouterr().out


def test_chosen_arms_are_compared_with_the_tables_first_all_the_same(command, table, runs: FakeRuns, capsys) -> None:
    slow, fast = table.arms
    named = replace(table, arms=(slow, replace(fast, name="fast, lag 4")))
    command("--seeds", "0", "1", "--arms", "fast, lag 4", of=named)
    assert runs.made == ["0.002 lag 4 seed 0", "0.002 lag 4 seed 1"]
    printed = capsys.readouterr().out
    assert "| arm | seeds | held_out | held_out - slow |" in printed
    assert "| `fast, lag 4` | 2 | 0.250 (0.200 to 0.300) |  |" in printed


def test_an_arm_is_run_on_its_tasks_only(command, table, runs: FakeRuns) -> None:
    command("--seeds", "0", of=replace(table, arms=(table.arms[0], replace(table.arms[1], only=("chain",)))))
    assert runs.made == ["0.001 lag 0 seed 0"]


def test_a_report_makes_nothing_and_pairs_the_seeds(command, runs: FakeRuns, capsys) -> None:
    command("--seeds", "0", "1")
    capsys.readouterr()
    command("--report")
    printed = capsys.readouterr().out
    assert len(runs.made) == 4
    # 0.1 and 0.2 against 0.2 and 0.3: the difference is 0.1 whatever the seed, and all seeds agree in its sign.
    assert "| `slow` | 2 | 0.150 (0.100 to 0.200) |  |" in printed
    assert "| `fast` | 2 | 0.250 (0.200 to 0.300) | 0.100 (0.100 to 0.100) * |" in printed


def test_more_comparisons_widen_the_intervals_of_the_differences(core: SimpleNamespace, table) -> None:
    assert core.report.level(table) == pytest.approx(0.95)
    three = replace(table, arms=(*table.arms, replace(table.arms[1], name="third")))
    assert core.report.level(three) == pytest.approx(0.975)
    rows = [
        {"task": "reversal", "arm": arm.name, "seed": seed, "wall_s": 1.0} | curve(value)
        for arm, values in zip(three.arms, ([0.0] * 5, [0.1, 0.3, 0.2, 0.5, 0.4], [0.0] * 5), strict=True)
        for seed, value in enumerate(values)
    ]
    wide = core.measures.bootstrap([0.1, 0.3, 0.2, 0.5, 0.4], 0.975)
    assert f"| 0.300 (0.180 to 0.420) | {wide} * |" in core.report.markdown(three, rows)


def test_an_arm_may_name_the_one_that_it_is_compared_with(core: SimpleNamespace, table) -> None:
    slow, fast = table.arms
    three = replace(table, arms=(slow, fast, replace(fast, name="third", against="fast")))
    rows = [
        {"task": "reversal", "arm": name, "seed": seed} | curve(value + seed / 10)
        for name, value in (("slow", 0.0), ("fast", 0.2), ("third", 0.5))
        for seed in range(2)
    ]
    printed = core.report.markdown(three, rows)
    assert "| arm | other | seeds | held_out | held_out - other |" in printed
    assert "| `slow` |  | 2 | 0.050 (0.000 to 0.100) |  |" in printed
    assert "| `fast` | slow | 2 | 0.250 (0.200 to 0.300) | 0.200 (0.200 to 0.200) * |" in printed
    assert "| `third` | fast | 2 | 0.550 (0.500 to 0.600) | 0.300 (0.300 to 0.300) * |" in printed


def test_what_it_took_is_compared_as_a_quotient(core: SimpleNamespace, table) -> None:
    measured = replace(table, measures=("steps_to_held_out_0.9",))
    rows = [
        {"task": "reversal", "arm": name, "seed": seed} | evaluated({step: 0.5, step + 2: 0.95, step + 4: 0.95})
        for name, steps in (("slow", (22, 38)), ("fast", (4, 8)))
        for seed, step in enumerate(steps)
    ]
    # 24 and 40 steps against 6 and 10: four times as many for both seeds.
    printed = core.report.markdown(measured, rows)
    assert "| steps_to_held_out_0.9 | slow / arm |" in printed
    assert "| `fast` | 2 | 8.000 (6.000 to 10.000) | 4.000 (4.000 to 4.000) * |" in printed


@pytest.mark.parametrize("name", TABLES)
def test_every_table_declares_runs_that_the_config_takes(name: str, core: SimpleNamespace) -> None:
    table = importlib.import_module(f"learning.{name}").TABLE
    for task in table.tasks:
        for arms in (table.arms, table.tried()):
            configs = [table.config(task, arm, 3) for arm in arms]
            assert all((c.data.seed, c.actors.seed, c.learner.seed) == (3, 3, 3) for c in configs)
            assert all(arm.lag <= c.buffer.max_staleness for arm, c in zip(arms, configs, strict=True))
            runs = {(c.model_dump_json(), arm.lag, arm.make) for arm, c in zip(arms, configs, strict=True)}
            assert len(runs) == len({arm.name for arm in arms}) == len(arms), "two arms are the same run"


# What rows say


def test_an_interval_holds_the_mean_and_is_the_same_each_time(core: SimpleNamespace) -> None:
    bootstrap = core.measures.bootstrap
    values = [0.1, 0.4, 0.35, 0.8, 0.6]
    one = bootstrap(values)
    assert one == bootstrap(values)
    assert min(values) <= one.low < one.mean < one.high <= max(values)
    assert one.mean == pytest.approx(0.45)
    assert bootstrap([0.5] * 5) == core.measures.Interval(0.5, 0.5, 0.5)
    assert bootstrap(values, level=0.5).low > one.low


def test_an_interval_covers_about_as_often_as_a_bootstrap_of_many_values_does(core: SimpleNamespace) -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(200):
        interval = core.measures.bootstrap([rng.gauss(0, 1) for _ in range(40)], draws=400)
        covered += interval.low <= 0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize(
    ("differences", "together"), [([1, 2], True), ([-1, -2], True), ([1, -1], False), ([0], False)]
)
def test_seeds_agree_when_their_differences_have_one_sign(differences, together: bool, core: SimpleNamespace) -> None:
    assert core.measures.agree(differences) is together


def test_a_threshold_is_passed_by_an_average_and_not_by_one_lucky_step(core: SimpleNamespace) -> None:
    m = core.measures
    lucky = curve(*[0.5] * 10, 1.0, *[0.5] * 10)
    assert m.steps_to(lucky, 0.9) is None
    assert m.tokens_to(lucky) == 210, "all of its tokens: a lower bound"
    learned = curve(*[0.0] * 5, *[1.0] * 20)
    assert m.steps_to(learned, 0.9) == 14  # nine of the last ten steps
    assert m.tokens_to(learned) == 140
    assert m.seconds_to(learned) == 26.0


def test_held_out_success_is_reached_where_the_next_evaluation_agrees(core: SimpleNamespace) -> None:
    m = core.measures
    lucky = evaluated({2: 0.91, 4: 0.89, 6: 0.9, 8: 0.95, 10: 0.6})
    assert m.held_out_reach(lucky) == 6
    assert m.to_reach(lucky, "steps") == 6
    assert m.to_reach(lucky, "tokens") == 60
    assert m.to_reach(lucky, "cpu_s") == 1.5
    assert m.reached(lucky) == 1.0
    assert m.held_out_reach(lucky, "greedy") == 2, "greedily 0.05 higher"
    assert m.mean_held_out(lucky) == pytest.approx(0.85)
    never = evaluated({2: 0.5, 4: 0.95, 6: 0.5, 8: 0.95})
    assert m.held_out_reach(never) is None
    assert m.reached(never) == 0.0
    assert m.to_reach(never, "tokens") == 80, "all of its tokens: a lower bound"


def test_a_collapse_shows_in_the_lowest_success_after_the_best(core: SimpleNamespace) -> None:
    m = core.measures
    assert m.lowest_after_best(curve(*[0.2] * 10, *[0.9] * 10)) == pytest.approx(0.9)
    assert m.lowest_after_best(curve(*[0.2] * 10, *[0.9] * 10, *[0.1] * 10)) == pytest.approx(0.1)
    assert m.last_success(curve(*[0.0] * 5, *[1.0] * 10)) == 1.0
    assert m.mean_success(curve(0.0, 1.0)) == 0.5


def test_the_clock_starts_at_the_first_batch(core: SimpleNamespace) -> None:
    row = core.launched.result([{"success": 0.1, "tokens": 5, "s": 12.5}, {"success": 0.2, "tokens": 9, "s": 14.0}])
    assert [point["s"] for point in row["curve"]] == [0.0, 1.5]
    assert row["tokens"] == 9
    with pytest.raises(ValueError, match="no training step"):
        core.launched.result([])


# What is replayed


def pair(group: int) -> list:
    return [trajectory(TicketId(0, group, index), reward=float(index)) for index in range(2)]


def test_a_group_is_replayed_within_its_bound_and_its_uses(core: SimpleNamespace) -> None:
    values = {
        "buffer.replay": 1.0, "buffer.max_uses": 3, "buffer.max_staleness": 2, "buffer.replay_priority": "uniform",
        "learner.groups_per_step": 1, "learner.group_size": 2,
    }  # fmt: skip
    memory = core.loop.Memory(Config.load(None, values))
    assert memory.draw(0, 0) == {}
    memory.add([0], pair(0), 2)
    assert memory.draw(1, 1) == {0: 1.0}
    assert [t.id.index for t in memory.trajectories({0: 1.0})] == [0, 1]
    assert memory.draw(1, 3) == {}, "older than the bound, it is gone"
    memory.add([1], pair(1), 2)
    for _ in range(2):
        assert memory.draw(2, 1) == {1: 1.0}
        memory.used({1: 1.0})
    assert memory.draw(3, 1) == {}, "its three uses are spent"


def test_without_replay_nothing_is_kept(core: SimpleNamespace) -> None:
    memory = core.loop.Memory(Config())
    memory.add([0], pair(0), 2)
    assert memory.draw(1, 1) == {}
    assert memory.trajectories({}) == []


@pytest.mark.system
def test_a_row_of_a_real_run_has_its_replayed_groups_its_lag_and_its_tokens(core: SimpleNamespace) -> None:
    values = {
        "buffer.replay": 1.0, "buffer.max_uses": 3, "buffer.max_staleness": 2, "buffer.replay_priority": "uniform",
        "learner.steps": 3, "learner.groups_per_step": 2, "learner.group_size": 2, "eval.tasks": 2,
    }  # fmt: skip
    row = core.loop.train(Config.load("quickstart", values), 1)
    assert [point["replayed"] for point in row["curve"]] == [0, 2, 2]
    assert row["steps"] == 3
    tokens = [point["tokens"] for point in row["curve"]]
    assert 0 < tokens[0] < tokens[1] < tokens[2] == row["tokens"]
    assert row["curve"][0]["staleness"] == 0, "version 0 samples for itself"
    assert 1 <= row["curve"][1]["staleness"] <= row["curve"][2]["staleness"]
    assert 0 <= row["held_out"] <= 1
    assert row["start"] == {}
    assert not any("held_out" in point for point in row["curve"])


@pytest.mark.system
def test_a_row_of_distillation_has_its_evaluations_and_a_clock_without_them(core: SimpleNamespace) -> None:
    values = {
        "learner.teacher.path": "quickstart", "learner.steps": 2, "learner.groups_per_step": 2, "learner.group_size": 1,
        "eval.every": 2, "eval.tasks": 24,
    }  # fmt: skip
    row = core.loop.train(Config.load("quickstart", values), 0)
    first, second = row["curve"]
    assert "held_out" not in first
    assert second.keys() == first.keys() | {"held_out", "greedy"}
    assert row["start"].keys() == {"held_out", "greedy"}
    assert second["held_out"] == row["held_out"], "the last step's evaluation, played with the same seeds"
    assert 0 < first["cpu_s"] < second["cpu_s"] < row["cpu_s"] / 2, "four evaluations take longer than two small steps"
    assert first["grad_norm"] < 1e-3, "the policy is its teacher's equal"
