"""Evaluation during the run, with the real processes: beside training, at a pinned version, and equal to
`asyncrl eval`."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import gather
from asyncrl.config.held_out import for_set
from asyncrl.errors import RunError
from asyncrl.evaluation import play_held_out, with_model
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.learner.checkpoints.checkpoints import complete
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launched import launched, pid
from tests.waiting import until

CONFIG: dict[str, Any] = {
    "model": {"path": "quickstart"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256},
    "actors": {"count": 2, "eval": 1, "slots": 1, "max_new_tokens": 48, "threads": 1},
    "buffer": {"max_staleness": 2, "capacity": 64},
    "learner": {
        "steps": 4, "groups_per_step": 2, "group_size": 4, "lr": 1e-3, "threads": 1, "checkpoint_every": 1,
        "keep_checkpoints": 9,
    },
    "eval": {"every": 2, "greedy": True, "sets": {"few": {"tasks": 3}, "cold": {"tasks": 2, "temperature": 0.5}}},
    "weights": {"channel": "shm"},
    "launch": {"seed": 1, "name": "run"},
}  # fmt: skip
GROUP = f"{Path(__file__).parent}/weights/device/gloo_channel.py:Gloo"
"""The channel `nccl` between CPUs."""
Run = Callable[..., RunFolder]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = RunFolder(tmp_path / "run")

    def finished(**changes: dict[str, Any]) -> RunFolder:
        sections = {name: values | changes.get(name, {}) for name, values in CONFIG.items()}
        sections["launch"] = sections["launch"] | {"runs_dir": str(tmp_path)}
        (tmp_path / "config.json").write_text(json.dumps(sections))
        command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(tmp_path / "config.json")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=400, check=False, cwd=Path(__file__).parents[1]
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return folder

    yield finished
    if (folder.path / "run.json").is_file():
        kill_all(of_run(folder.id))
        folder.remove_temporary()


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("actors", "channel"),
    [
        pytest.param({"count": 2, "eval": 1}, "shm", id="reserved"),
        pytest.param({"count": 1, "eval": 0}, "shm", id="in turn", marks=pytest.mark.slow),
        pytest.param({"count": 2, "eval": 1}, "zmq", id="reserved, over zmq", marks=pytest.mark.slow),
        pytest.param({"count": 2, "eval": 1}, GROUP, id="reserved, over a process group", marks=pytest.mark.slow),
    ],
)
def test_sets_are_played_beside_training_and_greedy_numbers_are_those_of_the_command(
    run: Run, actors: dict[str, Any], channel: str
) -> None:
    finished = run(actors=actors, weights={"channel": channel})
    config = finished.load_config()
    with closing(PayloadFiles(finished.buffer / "payloads")) as payloads:
        assert list(violations(gather(finished, config, payloads))) == []
    ledger = read_ledger(finished.buffer)
    evals = ledger.tables["evals"]
    played = {(row["name"], row["due"]): row for row in evals if row["state"] == "done"}
    assert {"few", "cold"} == {name for name, due in played if due == 2}
    assert {due for _, due in played} == {0, 2, 4}
    greedy = {
        (row["serial"], row["task"]): (row["task_id"], row["reward"])
        for row in ledger.tables["eval_results"]
        if row["greedy"]
    }
    at_two = next(path for path in complete(finished.checkpoints) if path.name == "step-000002")
    for name in ("few", "cold"):
        again = for_set(with_model(config, at_two), name)
        _, replayed = asyncio.run(play_held_out(again, at_two, Console(file=io.StringIO())))
        serial = played[name, 2]["serial"]
        assert [(p.trajectory.task_id, p.trajectory.reward) for p in replayed if p.trajectory] == [
            greedy[serial, task] for task in range(len(replayed))
        ]
    records = {int(record["step"]): record for record in by_step(finished.metrics)}
    for step in (0, 2, 4):
        assert {"reward/held_out/few/sampled", "reward/held_out/cold/greedy_low"} <= records[step].keys()
    assert "reward/mean" in records[2], "the results are merged with the record of their step"
    assert records[2]["reward/held_out_success_greedy"] == records[2]["reward/held_out/few/greedy"]
    report = (finished.path / "report.html").read_text()
    assert "Success on each held-out set" in report


KILLED = ("actor-0", "learner", "buffer", "actor-1")
SERVED = ("weights", *KILLED)
RESTART_S = 240.0
"""On a machine that is busy with other things, starting torch takes a minute."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("actors", "channel", "roles"),
    [
        pytest.param({"count": 2, "eval": 1}, "shm", KILLED, id="reserved"),
        pytest.param({"count": 2, "eval": 0}, "shm", KILLED, id="chosen"),
        pytest.param({"count": 2, "eval": 0}, "zmq", SERVED, id="chosen, over zmq"),
        pytest.param({"count": 2, "eval": 0}, GROUP, KILLED, id="chosen, over a process group"),
    ],
)
def test_kills_during_evaluations(tmp_path: Path, actors: dict[str, Any], channel: str, roles: tuple[str, ...]) -> None:
    """Each kill during another evaluation: each task counts once per set, every evaluated token carries the pinned
    version, and the audit is exact."""
    kills = int(os.environ.get("ASYNCRL_TEST_KILLS", "30"))
    sections = {name: dict(values) for name, values in CONFIG.items()}
    sections["actors"] |= actors | {"slots": 4}
    sections["weights"]["channel"] = channel
    sections["env"]["options"] = {"tool_latency_s": "0.3"}
    sections["learner"] |= {"steps": 100_000, "checkpoint_every": 3, "keep_checkpoints": 2}
    sections["buffer"]["lease_s"] = 10.0
    sections["launch"] |= {"restarts": 1000}
    with launched(tmp_path, sections) as it:
        run, last = it.run, 0
        for number, role in zip(range(kills), itertools.cycle(roles), strict=False):
            assert until(lambda last=last: newest_open(run) > last, RESTART_S), it.said
            last = newest_open(run)
            before = pid(run, role)
            time.sleep(0.05 * (number % 7))
            os.kill(before, signal.SIGKILL)
            again = until(lambda role=role, before=before: pid(run, role) not in (0, before), RESTART_S)
            assert again, f"kill {number} of {role}\n{it.said}"
        it.launcher.send_signal(signal.SIGINT)
        it.launcher.wait(RESTART_S)
    with closing(PayloadFiles(run.buffer / "payloads")) as payloads:
        assert list(violations(gather(run, run.load_config(), payloads))) == []
    tables = read_ledger(run.buffer).tables
    counted = Counter(row["serial"] for row in tables["eval_results"])
    whole = {"few": 3 * 2, "cold": 2 * 2}
    done = [row for row in tables["evals"] if row["state"] == "done"]
    assert all(counted[row["serial"]] == whole[row["name"]] for row in done)
    assert len({(row["name"], row["branch"], row["due"]) for row in done}) == len(done)
    assert len({row["due"] for row in done}) >= kills // 2
    pinned = {row["serial"]: row["version"] for row in tables["evals"]}
    results = [row for row in tables["eval_results"] if row["digest"]]
    assert results
    assert all(row["oldest"] == row["newest"] == pinned[row["serial"]] for row in results)


def newest_open(run: RunFolder) -> int:
    """Serial of the newest set that is open, while every process that is killed is there; else 0."""
    if not all(pid(run, role) for role in KILLED):
        return 0
    try:
        evals = read_ledger(run.buffer).tables["evals"]
    except RunError:
        return 0
    return max((row["serial"] for row in evals if row["state"] == "open"), default=0)
