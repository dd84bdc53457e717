"""Whole runs with rewards that raise, are no number, or hang: they cost their own episodes, are counted, and teach
nothing; when everything fails, the run says what and stops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

FILES = """
import os, time

def task(rng):
    n = rng.randrange(8)
    what = ("raises", "nan", "hangs", "dies")[n] if n < 4 else "fine"
    return {"prompt": f"go {rng.randrange(10**6)}", "ground_truth": "0", "id": f"{what}-{rng.random()}"}

def score(data_source, solution_str, ground_truth, extra_info, task):
    what = task["id"].partition("-")[0]
    if what == "raises":
        raise ValueError("this one raises")
    if what == "nan":
        return float("nan")
    if what == "hangs":
        time.sleep(1000)
    if what == "dies":
        os._exit(3)
    return 1.0 + len(solution_str) % 2

def away(data_source, solution_str, ground_truth, extra_info):
    raise ConnectionError("the tool is away")

def wrong(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["answer"])

def unseen(data_source, solution_str, ground_truth, extra_info, task):
    if "held_out" in task["id"]:
        raise LookupError("no answer to a held-out task")
    return 1.0 + len(solution_str) % 2

def plain(rng):
    return {"prompt": f"go {rng.randrange(10**6)}", "ground_truth": "0"}
"""


def launched(tmp_path: Path, score: Any, **sections: dict[str, Any]) -> tuple[int, str, RunFolder]:
    """Exit code, what was said, and the run."""
    (tmp_path / "mine.py").write_text(FILES)
    config: dict[str, Any] = {
        "data": {"source": "generated", "options": {"function": "mine.py:task", "held_out_size": 2}},
        "env": {"name": "single_turn", "options": {"score": score}, "max_turns": 1, "max_tokens": 96, "retries": 0},
        "actors": {"slots": 16, "max_new_tokens": 6},
        "buffer": {"capacity": 64},
        "learner": {"steps": 3, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 3},
        "eval": {"tasks": 0},
        "launch": {"runs_dir": str(tmp_path), "name": "run"},
    }
    for section, fields in sections.items():
        config[section] |= fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    return command(tmp_path, "--config", str(tmp_path / "config.json"))


def command(tmp_path: Path, *words: str) -> tuple[int, str, RunFolder]:
    run = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "asyncrl", "launch", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    finally:
        if (run.path / "run.json").is_file():
            left = of_run(run.id)
            kill_all(left)
    assert not left, "every process of the run has ended"
    return done.returncode, done.stdout + done.stderr, run


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_score_that_always_raises_ends_the_run_with_its_line_and_resume_tries_again(tmp_path: Path) -> None:
    data = {"options": {"function": "mine.py:plain", "held_out_size": 40}}
    code, said, run = launched(tmp_path, "mine.py:wrong", data=data, env={"retries": 2}, eval={"tasks": 40})
    assert code == 1, said
    line = FILES.splitlines().index('    return float(extra_info["answer"])') + 1
    assert f"KeyError: 'answer' ({tmp_path / 'mine.py'}, line {line}, in wrong)" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert ledger_of(run).trajectories == {}
    (tmp_path / "mine.py").write_text(FILES.replace('extra_info["answer"]', "len(solution_str) % 2"))
    code, said, _ = command(tmp_path, "--resume", str(run.path))
    assert code == 0, said
    assert run.read_summary()["steps"] == 3
    assert "no held-out episode" not in said, "the evaluation that failed goes on, too"
    assert len(ledger_of(run).trajectories) >= 12


@pytest.mark.system
@pytest.mark.timeout(300)
def test_why_the_first_evaluation_failed_is_on_the_terminal(tmp_path: Path) -> None:
    data = {"options": {"function": "mine.py:plain", "held_out_size": 2}}
    code, said, _ = launched(tmp_path, "mine.py:unseen", data=data, eval={"tasks": 2})
    assert code == 0, said
    line = FILES.splitlines().index('        raise LookupError("no answer to a held-out task")') + 1
    before, failed, after = said.partition("episodes failed in the environment; the last one: env_error: ")
    assert failed, said
    assert "step 1/3" not in before, "it is said before the first step"
    assert after.startswith("environment.step: LookupError: no answer")
    assert f"no answer to a held-out task ({tmp_path / 'mine.py'}, line {line}, in unseen)" in after.splitlines()[0]


def ledger_of(run: RunFolder) -> LedgerRows:
    return read_ledger(run.ledger(run.load_config()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rewards_that_fail_cost_their_own_episodes_and_the_run_goes_on(tmp_path: Path) -> None:
    score = {"name": "mine.py:score", "wrap": [{"name": "in_processes", "timeout_s": 2.0, "processes": 4}]}
    env = {"workers": "processes", "worker_count": 2, "call_s": 25.0, "max_failures": 1.0}
    # Long enough that all four kinds are drawn, and time out, on a fast machine too.
    code, said, run = launched(tmp_path, score, env=env, learner={"steps": 20, "checkpoint_every": 10})
    assert code == 0, said
    ledger = ledger_of(run)
    failed = {g.task_id.partition("-")[0] for g in ledger.groups.values() if g.reason == "env_error"}
    trained = {g.task_id.partition("-")[0] for g in ledger.groups.values() if g.state == "trained"}
    assert failed == {"raises", "nan", "hangs", "dies"}
    assert trained == {"fine"}
    assert all(row.reward in (1.0, 2.0) for row in ledger.trajectories.values()), "no failure became a reward"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_outage_stops_the_run_where_that_is_wished(tmp_path: Path) -> None:
    env = {"max_failures": 0.5, "failure_window": 20, "on_failures": "stop"}
    code, said, run = launched(tmp_path, "mine.py:away", env=env)
    assert code == 1, said
    assert "of the last 20 episodes failed in their environment" in said
    assert "ConnectionError: the tool is away" in said
    assert "failing" in (run.path / "events.jsonl").read_text()
    assert ledger_of(run).trajectories == {}
