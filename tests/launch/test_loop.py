"""The launcher's loop over real processes (fake_role.py): whatever ends, nothing is left running."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch import loop
from asyncrl.launch.backends.local import Local
from asyncrl.launch.preflight import living, refuse_live
from asyncrl.launch.processes import Role
from asyncrl.launch.supervision import shutdown
from asyncrl.launch.supervision.interrupts import Interrupts
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.collector import Collector
from tests.launch.fakes import fake, pids_of, running
from tests.waiting import until

LAUNCHER = str(Path(__file__).with_name("fake_launcher.py"))
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch(run: RunFolder) -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def start(**roles: str) -> subprocess.Popen[str]:
        words = [f"{name.replace('_', '-')}={behaviour}" for name, behaviour in roles.items()]
        process = subprocess.Popen(
            [sys.executable, LAUNCHER, str(run.path), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def all_started(run: RunFolder, *names: str) -> bool:
    return until(lambda: all(pids_of(run, name) for name in names), 60.0)


def gone(run: RunFolder, seconds: float = 60.0) -> list[str]:
    """The test's claim: no process of the run is left, by pid or by mark; returns those that are."""
    pids = [pid for note in run.path.glob("*.pids") for pid in map(int, note.read_text().split())]
    assert pids, "no role ever started"
    until(lambda: not any(map(running, pids)) and not living(run), seconds)
    return [str(pid) for pid in pids if running(pid)] + list(living(run).values())


@pytest.mark.system
def test_the_run_ends_when_the_learner_is_done(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="done", actor_0="stay", actor_1="daemon")
    assert all_started(run, "buffer", "learner", "actor-0", "actor-1")
    sockets, shm = run.sockets, run.shm
    (run.path / "done").touch()
    out, err = launcher.communicate(timeout=100)
    assert out.strip() == "finished 0", err
    assert gone(run) == []
    assert (run.path / "stopped").read_text().split()[-1] == "buffer"
    assert not sockets.exists()
    assert not shm.exists()


@pytest.mark.system
def test_ctrl_c_stops_in_order(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="stay", actor_0="stay")
    assert all_started(run, "buffer", "learner", "actor-0")
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    assert out.startswith("interrupted")
    assert (run.path / "stopped").read_text().split() == ["actor-0", "learner", "buffer"]
    assert gone(run) == []


def patient(run: RunFolder, config: Config) -> None:
    """Lets the launcher wait much longer for a role that is asked to end than a busy machine takes to end one."""
    run.save_config(config.model_copy(update={"launch": config.launch.model_copy(update={"stop_s": 60.0})}))


@pytest.mark.system
def test_a_second_ctrl_c_kills(run: RunFolder, launch: Launch, config: Config) -> None:
    patient(run, config)
    launcher = launch(buffer="deaf", learner="deaf", actor_0="deaf")
    assert all_started(run, "buffer", "learner", "actor-0")
    launcher.send_signal(signal.SIGINT)
    assert until((run.path / "asked").is_file, 60.0), "two signals that come together are one"
    assert launcher.poll() is None
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=100)
    assert time.monotonic() - began < 50.0, "launch.stop_s is 60 s for each kind of role: it was waited for"
    assert gone(run) == []


class FakeStuck:
    """Fake: a process that no signal ends, being stuck in the kernel."""

    def __init__(self, role: Role, log: Path) -> None:
        self.role, self.log, self.killed_for, self.started = role, log, "", time.monotonic()
        self.identity, self.local, self.lost = None, True, False

    def ended(self) -> int | None:
        return None

    def stop(self) -> None: ...

    def kill(self, why: str) -> None:
        self.killed_for = why


def test_a_process_that_no_kill_ends_is_left_to_the_kernel(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeBackend(Local):
        def start(self, role: Role, *, again: bool = False) -> FakeStuck:  # type: ignore[override]
            interrupts.count = 1
            return FakeStuck(role, run.log(role.name))

    monkeypatch.setattr(shutdown, "KILL_S", 0.3)
    config = run.load_config()
    limits = config.launch.model_copy(update={"stop_s": 0.2, "start_s": 0.1, "restarts": 0})
    config = config.model_copy(update={"launch": limits})
    collector = Collector(run, config)
    interrupts = Interrupts()
    stuck = [fake(run, name, "stay") for name in ("learner", "actor-0")]
    launcher = loop.Launcher(run, config, stuck, collector, interrupts, FakeBackend(run, config))
    ended = threading.Thread(target=launcher.supervise, daemon=True)
    ended.start()
    ended.join(60.0)
    assert not ended.is_alive()
    collector.close()
    events = (run.path / "events.jsonl").read_text()
    assert "does not end although it was killed" in events
    assert "actor-0" not in events, "a role was started after the interrupt"


@pytest.mark.parametrize("guardian_too", [False, True])
def test_nothing_outlives_a_launcher_killed_dead(run: RunFolder, launch: Launch, guardian_too: bool) -> None:
    launcher = launch(buffer="deaf", learner="stay", actor_0="stay" if guardian_too else "daemon")
    assert all_started(run, "buffer", "learner", "actor-0")
    guardian = guardian_of(launcher.pid)
    assert guardian
    assert until(lambda: looked_again(guardian), 60.0), "the guardian notes the daemon"
    sockets, shm = run.sockets, run.shm
    if guardian_too:
        os.kill(launcher.pid, signal.SIGSTOP)  # so that it does not start another one
        os.kill(guardian, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
    assert gone(run) == []
    if not guardian_too:
        assert until(lambda: not sockets.exists() and not shm.exists(), 60.0)


def test_a_killed_guardian_is_replaced(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="stay")
    assert all_started(run, "buffer", "learner")
    first = guardian_of(launcher.pid)
    assert first
    os.kill(first, signal.SIGKILL)
    assert until(lambda: guardian_of(launcher.pid) not in (0, first), 60.0)
    assert launcher.poll() is None


SYSTEM = pytest.mark.system


@pytest.mark.parametrize(
    "role", [pytest.param("buffer", marks=SYSTEM), "learner", pytest.param("actor-0", marks=SYSTEM)]
)
@pytest.mark.system
def test_a_role_killed_dead_is_started_again(run: RunFolder, launch: Launch, role: str) -> None:
    launcher = launch(buffer="stay", learner="done", actor_0="stay")
    assert all_started(run, "buffer", "learner", "actor-0")
    process, grandchild = pids_of(run, role)
    os.kill(process, signal.SIGKILL)
    assert until(lambda: len(pids_of(run, role)) == 4), "not started again"
    assert not running(grandchild), "what it had started lives on"
    (run.path / "done").touch()
    out, err = launcher.communicate(timeout=100)
    assert out.strip() == "finished 0", err
    assert gone(run) == []


@pytest.mark.system
def test_a_learner_that_someone_else_stops_is_started_again(run: RunFolder, launch: Launch) -> None:
    """With the ranks that it has ended; Ctrl-C, in another test, ends the run as before."""
    launcher = launch(buffer="stay", learner="saves", learner_1="stay")
    ranks = ("learner", "learner-1")
    assert all_started(run, "buffer", *ranks)
    for name in reversed(ranks):  # as at the order to end, which the others follow first
        os.kill(pids_of(run, name)[0], signal.SIGTERM)
    assert until(lambda: all(len(pids_of(run, name)) == 4 for name in ranks)), "not started again"
    (run.path / "done").touch()
    out, err = launcher.communicate(timeout=100)
    assert out.strip() == "finished 0", err
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    why = [e["why"] for e in events if e["kind"] == "restart" and e["role"] == "learner"]
    assert why == ["told to stop, and not by the launcher"]
    assert gone(run) == []


@pytest.mark.system
def test_ranks_live_and_die_together(run: RunFolder, launch: Launch, config: Config) -> None:
    patient(run, config)
    launcher = launch(buffer="stay", learner="done", learner_1="deaf", learner_2="deaf", actor_0="stay")
    ranks = ("learner", "learner-1", "learner-2")
    assert all_started(run, *ranks, "buffer", "actor-0")
    before = {name: pids_of(run, name) for name in ranks}
    run.rendezvous.touch()
    os.kill(before["learner-1"][0], signal.SIGKILL)
    assert until(lambda: all(len(pids_of(run, name)) == 4 for name in ranks), 60.0), "not all were started again"
    assert not run.rendezvous.exists(), "the new ones would meet the old ones there"
    assert not [pid for pids in before.values() for pid in pids if running(pid)]
    assert len(pids_of(run, "actor-0")) == 2, "nobody else was touched"
    (run.path / "done").touch()
    began = time.monotonic()
    out, err = launcher.communicate(timeout=100)
    assert out.strip() == "finished 0", err
    assert time.monotonic() - began < 50.0, "those that follow rank 0 were waited for"
    assert gone(run) == []


@pytest.mark.system
def test_ranks_that_die_at_once_start_anew_once(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="done", learner_1="deaf")
    ranks = ("learner", "learner-1")
    assert all_started(run, *ranks)
    for name in ranks:
        os.kill(pids_of(run, name)[0], signal.SIGKILL)
    assert until(lambda: all(len(pids_of(run, name)) == 4 for name in ranks), 60.0)
    until(lambda: False, 1.0)
    (run.path / "done").touch()
    assert launcher.communicate(timeout=100)[0].strip() == "finished 0"
    assert [len(pids_of(run, name)) for name in ranks] == [4, 4]


@pytest.mark.system
def test_ranks_share_one_budget(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="stay", learner_1="die")
    out, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "learner-1 died more than 2 times" in out
    assert gone(run) == []


@pytest.mark.system
@pytest.mark.system
def test_an_exhausted_budget_ends_the_run(run: RunFolder, launch: Launch) -> None:
    launcher = launch(buffer="stay", learner="stay", actor_0="die")
    out, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "actor-0 died more than 2 times" in out
    assert "ValueError: no such weather" in out
    assert len(pids_of(run, "actor-0")) == 2 * 3
    assert gone(run) == []


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [("config", 2, "learner.loss"), pytest.param("fatal", 1, "disk is full", marks=SYSTEM)],
)
@pytest.mark.system
def test_some_ends_are_final(run: RunFolder, launch: Launch, behaviour: str, code: int, words: str) -> None:
    launcher = launch(buffer="stay", learner=behaviour)
    out, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == code
    assert words in out
    assert len(pids_of(run, "learner")) == 2, "it was started again"
    assert gone(run) == []


@pytest.mark.parametrize("full", [pytest.param("run", marks=SYSTEM), "ledger"])
@pytest.mark.system
def test_what_dies_beside_a_full_disk_is_not_started_again(
    run: RunFolder, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Also where the ledger has a disk of its own."""
    folders = {"run": run.path, "ledger": tmp_path / "ledger"}
    folders["ledger"].mkdir()
    config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"dir": str(folders["ledger"])})})
    usage = SimpleNamespace(free=0)
    known = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if Path(path) == folders[full] else known(path))
    collector = Collector(run, config)
    launcher = loop.Launcher(run, config, [fake(run, "buffer", "die")], collector, Interrupts())
    outcome = launcher.supervise()
    collector.close()
    assert (outcome.kind, outcome.exit_code) == ("failed", 1)
    assert outcome.why.startswith(f"the disk of {folders[full]} is full")
    assert len(pids_of(run, "buffer")) == 2, "it was started again"


@pytest.mark.system
def test_a_role_that_is_never_ready_is_restarted_and_then_ends_the_run(
    run: RunFolder, launch: Launch, config: Config
) -> None:
    limits = config.launch.model_copy(update={"start_s": 3.0, "restarts": 0})
    run.save_config(config.model_copy(update={"launch": limits}))
    launcher = launch(buffer="mute")  # on a busy machine it may take longer until it begins at all
    out, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "not ready within launch.start_s = 3 s" in out
    assert until(lambda: not living(run))
    assert not list(run.path.glob("*.pids")) or gone(run) == [], "unless it had not begun by then"


def test_a_live_run_is_refused_and_its_processes_named(run: RunFolder, launch: Launch) -> None:
    launch(buffer="stay", learner="stay")
    assert all_started(run, "buffer", "learner")
    with pytest.raises(RunError, match=r"launcher \(pid \d+\).*buffer \(pid \d+\).*learner \(pid \d+\)"):
        refuse_live(run)
    with pytest.raises(RunError, match="another launcher"), run.locked():
        pass


def looked_again(guardian: int) -> bool:
    """Whether it has imported all it needs and then waited twice: it looks for processes in between."""
    process = psutil.Process(guardian)
    if not until(lambda: any("_psutil" in mapped.path for mapped in process.memory_maps()), 60.0):
        return False
    before = process.num_ctx_switches().voluntary
    return until(lambda: process.num_ctx_switches().voluntary >= before + 2, 60.0)


def guardian_of(launcher: int) -> int:
    """0: there is none."""
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.Error):
            if "asyncrl.launch.guardian" in child.cmdline():
                return child.pid
    return 0
