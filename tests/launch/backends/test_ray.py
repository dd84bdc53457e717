"""The launcher's loop with Ray: real Ray nodes on one machine, one of them lost; the whole loop over two of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.audit.command import audit
from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import Role, kill_all, of_run
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launch.backends.ray_nodes import Nodes, ray_nodes
from tests.launch.fakes import pids_of, running
from tests.waiting import until

pytestmark = pytest.mark.system  # the nodes alone take longer to come and go than most tests
HERE = Path(__file__).parent
LIMITS = {"restarts": 2, "stop_s": 10.0, "start_s": 60.0, "stall_s": 5.0}
Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as opened:
        opened.add(home=8)
        yield opened


@pytest.fixture
def run(tmp_path: Path, nodes: Nodes) -> Iterator[RunFolder]:
    given = {
        "launch": LIMITS | {"backend": "ray", "host": "127.0.0.1"},
        "ray": {"address": nodes.address, "resources": {"buffer": {"home": 1}, "learner": {"home": 1}}},
        "weights": {"channel": "zmq"},
        "actors": {"drain_s": 0.0},
        "eval": {"tasks": 0},
    }
    folder = RunFolder.create(tmp_path / "run", Config.model_validate(given))
    yield folder
    kill_all(of_run(folder.id))
    folder.remove_temporary()


@pytest.fixture
def launch() -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        # Its own group, so that Ray's signal handling in the launcher is not that of the tests.
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, cwd=HERE.parents[2], env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def fakes(launch: Launch, run: RunFolder, **behaviours: str) -> subprocess.Popen[str]:
    words = [f"{name.replace('_', '-')}={behaviour}" for name, behaviour in behaviours.items()]
    return launch(str(HERE.parent / "fake_launcher.py"), str(run.path), *words)


def gone(run: RunFolder) -> list[int]:
    pids = [pid for note in run.path.glob("*.pids") for pid in map(int, note.read_text().split())]
    assert pids, "no role ever started"
    until(lambda: not any(map(running, pids)), 10.0)
    return [pid for pid in pids if running(pid)]


def lineage(pids: list[int]) -> list[str]:
    """Each that runs, with whose child it is, whose child that is, ..."""
    return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for pid in filter(running, pids)
            for p in (psutil.Process(pid), *psutil.Process(pid).parents())]  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate(timeout=10)[0]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_lost_node_s_role_starts_anew_on_another_and_nothing_is_left(
    nodes: Nodes, run: RunFolder, launch: Launch
) -> None:
    config = run.load_config()
    spot = {**config.ray.resources, "actor": {"spot": 1}}
    run.save_config(config.model_copy(update={"ray": config.ray.model_copy(update={"resources": spot})}))
    node = nodes.add(spot=1)
    launcher = fakes(launch, run, buffer="stay", learner="done", learner_1="stay", actor_0="stay")
    names = ("buffer", "learner", "learner-1", "actor-0")
    assert until(lambda: all(pids_of(run, name) for name in names), 60.0), output(launcher)
    first = pids_of(run, "actor-0")
    shm = run.shm
    nodes.lose(node)
    assert until(lambda: not any(map(running, first)), 30.0), f"outlived its node: {lineage(first)}"
    until(lambda: False, 2.0)
    assert launcher.poll() is None, "the run can do without an actor"
    assert len(pids_of(run, "actor-0")) == 2, "there is no node with room for it"
    other = nodes.add(spot=1)
    assert until(lambda: len(pids_of(run, "actor-0")) == 4, 60.0), output(launcher)
    assert all(len(pids_of(run, name)) == 2 for name in names[:3]), "nobody else was touched"
    os.kill(pids_of(run, "learner-1")[0], signal.SIGKILL)
    assert until(lambda: all(len(pids_of(run, name)) == 4 for name in names[1:3]), 30.0), "ranks start anew together"
    (run.path / "done").touch()
    out, _ = launcher.communicate(timeout=60)
    assert "finished 0" in out, out
    assert gone(run) == []
    assert (run.path / "stopped").read_text().split()[-1] == "buffer"
    assert not shm.exists()
    nodes.lose(other)


@pytest.mark.timeout(120)
def test_nothing_outlives_a_launcher_killed_dead(run: RunFolder, launch: Launch) -> None:
    launcher = fakes(launch, run, buffer="deaf", learner="stay")
    assert until(lambda: bool(pids_of(run, "buffer") and pids_of(run, "learner")), 60.0), output(launcher)
    launcher.kill()
    launcher.wait()
    assert gone(run) == []


@pytest.mark.timeout(120)
def test_ctrl_c_stops_in_order_and_a_fatal_end_is_final(run: RunFolder, launch: Launch) -> None:
    launcher = fakes(launch, run, buffer="stay", learner="stay", actor_0="stay")
    names = ("buffer", "learner", "actor-0")
    assert until(lambda: all(pids_of(run, name) for name in names), 60.0), output(launcher)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, out
    assert (run.path / "stopped").read_text().split() == ["actor-0", "learner", "buffer"]
    assert gone(run) == []
    run.open()
    out, _ = fakes(launch, run, buffer="fatal").communicate(timeout=60)
    assert "failed 1 buffer: the disk is full." in out


def test_a_cluster_that_is_not_there_is_said(run: RunFolder) -> None:
    from asyncrl.launch.backends.ray import Ray

    config = run.load_config()
    nowhere = config.ray.model_copy(update={"address": "127.0.0.1:1"})
    with pytest.raises(RunError, match=r"ray\.address is '127\.0\.0\.1:1', and no cluster answers there"):
        Ray(run, config.model_copy(update={"ray": nowhere}))


def test_all_that_share_a_lost_node_go_to_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own part is a fake. Of two ranks, only the second is known to be lost; the first was killed for it."""
    from asyncrl.launch.backends import ray

    class Ended:
        def __init__(self, place: object, lost: bool) -> None:
            self.place, self.lost = place, lost

    removed: list[object] = []
    monkeypatch.setattr(ray, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray, "placement_group", lambda bundles, strategy: object())
    backend, group, old = object.__new__(ray.Ray), ("learner", "learner-1"), object()
    backend._config, backend._groups = Config(), {group: old}  # type: ignore[assignment]
    backend._processes = {"learner": Ended(old, False), "learner-1": Ended(old, True)}  # type: ignore[dict-item]
    first = backend._place(group)
    backend._processes["learner"] = Ended(first, False)  # type: ignore[assignment]
    assert (backend._place(group), removed) == (first, [old])


class FakeMethod:
    """A method of a host on some node of Ray."""

    def remote(self, *given: object) -> object:
        return object()


class FakeHost:
    began = wait = stop = kill = FakeMethod()


@pytest.mark.parametrize("waits_for_node", [False, True])
def test_a_host_that_ends_by_itself_is_lost_whatever_was_asked_of_its_role(
    monkeypatch: pytest.MonkeyPatch, waits_for_node: bool
) -> None:
    """Ray's own part is a fake. A rank on another node died of the loss first, and this one was to be killed for it;
    unless its host was ended because it had no node yet."""
    from ray.exceptions import RayActorError

    from asyncrl.launch.backends import ray

    ready: list[object] = []
    ended: list[object] = []

    def get(answer: object) -> object:
        if answer is process._began:
            return 1, 0.0, "10.1.0.7"
        raise RayActorError

    monkeypatch.setattr(ray.ray, "wait", lambda asked, timeout: ([each for each in asked if each in ready], []))
    monkeypatch.setattr(ray.ray, "get", get)
    monkeypatch.setattr(ray.ray, "kill", lambda host, no_restart: ended.append(host))
    host, place = FakeHost(), object()
    process = ray.RayProcess(Role("learner-2", ("none",), leader="learner"), Path("log"), host, place)  # type: ignore[arg-type]
    if not waits_for_node:
        ready.append(process._began)
    process.kill("learner died")
    assert until(lambda: process.ended() is None and bool(ended) == waits_for_node)
    ready.append(process._end)
    assert (process.ended(), process.killed_for, process.lost) == (-9, "learner died", not waits_for_node)


def cannot_start() -> Exception:
    from ray.exceptions import ActorDiedError, RayTaskError

    told = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'asyncrl'\n"
    return ActorDiedError(RayTaskError("RoleHost.__init__", told, RuntimeError("failed to import"), actor_id="ab" * 16))


def cannot_read() -> Exception:
    from ray.exceptions import RayTaskError

    cause = OSError(116, "Stale file handle")
    error: Exception = RayTaskError("wait", f"Traceback\nOSError: {cause}", cause).as_instanceof_cause()
    return error


def no_place() -> Exception:
    from ray.exceptions import ActorUnschedulableError

    return ActorUnschedulableError("its placement group was removed")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            cannot_start,
            3,
            "its host cannot start on a node: ModuleNotFoundError: No module named 'asyncrl'. Every node",
        ),
        (cannot_read, 1, "Stale file handle"),
        (no_place, 1, "its placement group was removed"),
    ],
)
def test_what_is_no_loss_of_a_node_is_told_and_counts_as_a_restart_or_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], code: int, words: str
) -> None:
    """Ray's own part is a fake. Before, a node without asyncrl was "lost", without end, and the others ended the run in
    a traceback."""
    from asyncrl.launch.backends import ray

    def get(answer: object) -> object:
        raise error()

    ended: list[object] = []
    monkeypatch.setattr(ray.ray, "wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(ray.ray, "get", get)
    monkeypatch.setattr(ray.ray, "kill", lambda host, no_restart: ended.append(host))
    host, place = FakeHost(), object()
    process = ray.RayProcess(Role("actor-0", ("none",)), Path("log"), host, place)  # type: ignore[arg-type]
    assert (process.ended(), process.lost, ended) == (code, False, [host])
    assert words in process.killed_for
    assert "lost" not in process.killed_for


def quickstart(launch: Launch, nodes: Nodes, folder: Path, **fields: object) -> subprocess.Popen[str]:
    """An actor on each node, everything else on one."""
    values = {
        "launch.runs_dir": folder, "launch.name": "run", "launch.backend": "ray", "launch.host": "127.0.0.1",
        "weights.channel": "zmq", "actors.count": 2, "ray.address": nodes.address,
        "ray.resources": {
            "buffer": {"home": 1}, "learner": {"home": 1}, "weights": {"home": 1},
            "actor-0": {"home": 1}, "actor-1": {"far": 1},
        },
    } | {name.replace("__", "."): value for name, value in fields.items()}  # fmt: skip
    words = [word for name, value in values.items() for word in (f"--{name}", _said(value))]
    return launch("-m", "asyncrl", "launch", "--config", str(HERE.parents[2] / "configs" / "quickstart.yaml"), *words)


def _said(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


@pytest.mark.timeout(200)
def test_the_whole_loop_on_two_nodes_one_of_them_lost(nodes: Nodes, tmp_path: Path, launch: Launch) -> None:
    node = nodes.add(far=1)
    small = {
        "learner__groups_per_step": 4, "learner__group_size": 4, "buffer__capacity": 64, "actors__slots": 8,
        "eval__tasks": 0, "learner__steps": 900, "learner__checkpoint_every": 10, "buffer__lease_s": 6.0,
    }  # fmt: skip
    launcher, run = quickstart(launch, nodes, tmp_path, **small), RunFolder(tmp_path / "run")
    assert until(lambda: run.metrics.is_file() and len(by_step(run.metrics)) >= 3, 150.0), output(launcher)
    before, first = len(by_step(run.metrics)), run.record()["processes"]["actor-1"]
    nodes.lose(node)
    assert until(lambda: len(by_step(run.metrics)) >= before + 5, 60.0), "the learner waited for the node that is lost"
    other = nodes.add(far=1)
    assert until(lambda: run.record()["processes"]["actor-1"] != first, 60.0), output(launcher)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, out
    assert json.loads(run.summary.read_text())["restarts"]["actor-1"] >= 1
    nodes.lose(other)
    assert living(run) == {}
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_on_two_nodes(nodes: Nodes, tmp_path: Path, launch: Launch) -> None:
    node = nodes.add(far=1)
    out, _ = quickstart(launch, nodes, tmp_path).communicate(timeout=1400)
    run = RunFolder(tmp_path / "run")
    assert json.loads(run.summary.read_text())["held_out_success_end"] >= 0.9, out
    assert {path.stem for path in run.acks.glob("*.jsonl")} == {"actor-0", "actor-1"}
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0
    nodes.lose(node)
