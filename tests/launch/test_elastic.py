"""Actors join a live run and leave it, with the real processes; the learner waits for none in particular."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.audit.command import audit
from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch import elastic
from asyncrl.launch.backends.local import Local
from asyncrl.launch.elastic import Actors, Membership, add, remove
from asyncrl.launch.placement import machine
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import Role, alive, kill_all, of_run
from asyncrl.launch.supervision.process_table import ProcessTable
from asyncrl.run_folder import RunFolder, replace
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launch.fakes import fake
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SMALL = {
    "learner.groups_per_step": 4, "learner.group_size": 4, "learner.steps": 500, "learner.checkpoint_every": 10,
    "buffer.capacity": 64, "buffer.lease_s": 6, "actors.count": 1, "actors.slots": 8, "eval.tasks": 0,
}  # fmt: skip
STARTS_S = 60.0
LAUNCH = [sys.executable, "-m", "asyncrl"]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    values = SMALL | {"launch.runs_dir": tmp_path, "launch.name": "run"}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    launcher = subprocess.Popen(
        [*LAUNCH, "launch", "--config", str(ROOT / "configs" / "quickstart.yaml"), *words],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    run = RunFolder(tmp_path / "run")
    yield launcher, run
    launcher.kill()
    launcher.communicate(timeout=10)
    kill_all(of_run(run.id))
    run.remove_temporary()


def lives(run: RunFolder, name: str) -> bool:
    return name in run.record()["processes"] and alive(*run.record()["processes"][name])


def steps(run: RunFolder) -> int:
    return max((int(r["step"]) for r in by_step(run.metrics)), default=0) if run.metrics.is_file() else 0


def stored(run: RunFolder, name: str) -> int:
    file = run.acks / f"{name}.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.system
@pytest.mark.timeout(200)
def test_actors_join_serve_leave_and_vanish(live: tuple[subprocess.Popen[str], RunFolder]) -> None:
    launcher, run = live
    events = run.path / "events.jsonl"
    assert until(lambda: steps(run) >= 1, STARTS_S), launcher.poll()
    said = subprocess.run([*LAUNCH, "actors", "add", "1", "--run", str(run.path)], capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, "actor-1 will join\n"), said.stderr
    assert until(lambda: stored(run, "actor-1") > 4, STARTS_S), "it does not serve"
    said = subprocess.run([*LAUNCH, "actors", "remove", "actor-0", "--run", str(run.path)], capture_output=True)
    assert said.returncode == 0
    assert until(lambda: not lives(run, "actor-0"), 30.0), "it does not leave"
    before = steps(run)
    assert until(lambda: steps(run) >= before + 3, STARTS_S), "the learner waited for the one that left"
    assert until(lambda: '"kind": "exit", "role": "actor-0", "why": "left"' in events.read_text()), "nobody is told"
    with pytest.raises(ConfigError, match="no such actor: expected one of actor-1"):
        remove(run, ["actor-0"])
    assert add(run, 1) == ["actor-2"], "a name is given once"
    assert until(lambda: lives(run, "actor-2") and stored(run, "actor-2") > 0, STARTS_S)
    os.kill(run.record()["processes"]["actor-1"][0], signal.SIGKILL)
    before = steps(run)
    assert until(lambda: steps(run) >= before + 3, STARTS_S), "the learner waited for the one that vanished"
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, out
    assert living(run) == {}
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0
    with pytest.raises(RunError, match="is not running"):
        add(run, 1)


def test_two_orders_at_once_are_both_seen(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    actors = Actors(run)
    actors.begin(["actor-0"])
    file = run.path / "actors.json"
    then = file.stat().st_mtime_ns
    replace(file, '["actor-0", "actor-7"]')
    os.utime(file, ns=(then, then))  # within one tick of the filesystem's clock
    assert actors.changed() == ["actor-0", "actor-7"]
    run.remove_temporary()


def test_a_launch_begins_with_the_actors_of_its_config(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    actors = Actors(run)
    actors.begin(["actor-0"])
    assert actors.changed() is None
    (run.path / "actors.json").write_text('["actor-0", "actor-7"]')
    assert actors.changed() == ["actor-0", "actor-7"]
    assert actors.changed() is None
    actors.begin(["actor-0"])
    assert (run.path / "actors.json").read_text() == '["actor-0"]\n'


class FakeCollector:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, kind: str, role: str = "launcher", **fields: Any) -> None:
        self.events.append((kind, fields.get("text") or fields.get("why") or ""))

    def exited(self, role: str, why: str = "") -> None:
        self.events.append(("exit", f"{role}: {why}"))


def test_an_actor_that_no_gpu_has_room_for_does_not_end_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(elastic, "actor", lambda run, config, name: fake(run, name, "stay"))
    config = Config.model_validate({"launch": {"gpus": {"learner": 1, "actor": 1}}, "actors": {"count": 1}})
    roles = [fake(run, name, "stay") for name in ("learner", "actor-0")]
    collector: Any = FakeCollector()
    run.note(processes={})
    table = ProcessTable(run, roles, config.launch, Local(run, config), collector)
    membership = Membership(run, config, table, collector)
    membership.begin()
    table.start_all(lambda: False)
    names = run.path / "actors.json"
    replace(names, '["actor-0", "actor-1"]')
    with (run.path / ".actors.lock").open("w") as held:  # a command writes: the launcher does not wait for it
        fcntl.flock(held, fcntl.LOCK_EX)
        membership.apply(0.0)
        membership.apply(0.0)
    assert table.names == list(table.processes) == ["learner", "actor-0"]
    ((kind, why),) = collector.events
    assert kind == "cannot_join"
    assert why.startswith("actor-1: actor-1 needs 1 GPU, and of the 2 of this machine none has room for it")
    membership.apply(0.0)
    assert names.read_text() == '["actor-0"]\n'
    membership.apply(0.0)
    replace(names, '["actor-1"]')  # GPUs of one that left are free
    membership.apply(0.0)
    assert collector.events[1][0] == "cannot_join"
    assert until(lambda: membership.apply(0.0) or "actor-0" not in table)
    assert names.read_text() == "[]\n"
    replace(names, '["actor-1"]')
    membership.apply(0.0)
    assert list(table.processes) == ["learner", "actor-1"]
    assert collector.events[-1] == ("joins", "actor-1")


def test_an_actor_whose_process_cannot_be_started_is_forgotten(run: RunFolder, config: Config) -> None:
    """A program that does not exist."""
    collector: Any = FakeCollector()
    run.note(processes={})
    table = ProcessTable(run, [], config.launch, Local(run, config), collector)
    with pytest.raises(RunError, match="actor-1 cannot be started"):
        table.join(Role("actor-1", ("/no/such/program",)))
    assert "actor-1" not in table
