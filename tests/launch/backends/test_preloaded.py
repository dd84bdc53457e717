"""Roles as forks of a process that has their imports, and when they are not forked."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config import Config
from asyncrl.launch.backends import preloaded
from asyncrl.launch.backends.preloaded import Preloaded, early, forkable, preloading
from asyncrl.launch.processes import Process, Role, adopt_orphans, of_run, python, role_of
from tests.waiting import until

PACKAGE = "tests.launch.backends.fake_package"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are adopted on Linux alone"), pytest.mark.timeout(60)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    adopt_orphans()
    return tmp_path


@contextlib.contextmanager
def forking(forks: int = 2, besides: Sequence[str] = ()) -> Iterator[Preloaded]:
    preloaded = Preloaded((PACKAGE,), besides)
    preloaded.expect(forks, 30.0)
    try:
        yield preloaded
    finally:
        preloaded.close()


def test_a_fork_begins_as_a_child_of_the_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process between them takes its time to end."""
    end = os._exit
    monkeypatch.setattr(os, "_exit", lambda code: (time.sleep(0.5), end(code)))
    pid = preloaded._fork_for_launcher()
    if pid == 0:
        (folder / "parent").write_text(str(os.getppid()))
        end(0)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert int((folder / "parent").read_text()) == os.getpid()


def start(
    preloaded: Preloaded,
    folder: Path,
    name: str,
    what: str,
    package: str = PACKAGE,
    interrupted: Callable[[], bool] = lambda: False,
) -> Process:
    role = Role(name, python(package, str(folder / name), what), environment={"MINE": name})
    return Process(
        role, preloaded.run_id, folder / f"{name}.log", fork=partial(preloaded.fork, interrupted=interrupted)
    )


def said(folder: Path, name: str) -> dict[str, Any]:
    assert until((folder / name).exists, 60), (folder / f"{name}.log").read_text()
    read: dict[str, Any] = json.loads((folder / name).read_text())
    return read


def test_a_fork_is_as_a_process_of_its_own(folder: Path) -> None:
    with forking() as preloaded:
        first, second = start(preloaded, folder, "a", "3"), start(preloaded, folder, "b", "stay")
        a, b = said(folder, "a"), said(folder, "b")
        assert a.pop("drawn") != b.pop("drawn"), "one seed of numpy in both"
        as_new = {"parent": os.getpid(), "leads": True, "lifeline": False, "forked": True}
        assert (a, b) == ({**as_new, "words": ["3"], "mine": "a"}, {**as_new, "words": ["stay"], "mine": "b"})
        assert until(lambda: first.ended() == 3, 60)
        assert (folder / "a.log").read_text() == "written\n"
        assert [process.pid for process in of_run(preloaded.run_id)] == [second.pid], "the preloading process is over"
        assert role_of(psutil.Process(second.pid)) == "b", "the kernel shows the environment of the preloading process"
        second.stop()
        assert until(lambda: second.ended() == -15, 60)


def test_a_fork_ends_with_the_pipe_of_its_launcher(folder: Path) -> None:
    with forking() as preloaded:
        role = start(preloaded, folder, "a", "stay")
        said(folder, "a")
        os.dup2(os.open(os.devnull, os.O_RDONLY), role._lifeline)
        assert until(lambda: role.ended() == -9, 60)


@pytest.mark.system
def test_what_cannot_be_forked_is_started_as_any_other(folder: Path) -> None:
    with forking(1) as preloaded:
        once, again = start(preloaded, folder, "once", "0"), start(preloaded, folder, "again", "0")
        other = start(preloaded, folder, "other", "0", f"{PACKAGE}.__main__")
    with forking(besides=(f"{PACKAGE}.thread",)) as preloaded:
        threaded = start(preloaded, folder, "threaded", "0")
    with forking() as preloaded:
        preloaded._process.kill()
        killed = start(preloaded, folder, "killed", "0")
    forked = {name: said(folder, name)["forked"] for name in ("once", "again", "other", "threaded", "killed")}
    assert forked == {"once": True, "again": False, "other": False, "threaded": False, "killed": False}
    for role in (once, again, other, threaded, killed):
        assert until(lambda role=role: role.ended() == 0, 60)  # type: ignore[misc]


def test_an_interrupted_launcher_waits_for_no_imports(folder: Path) -> None:
    with forking(besides=(f"{PACKAGE}.slow",)) as preloaded:
        began = time.monotonic()
        role = start(preloaded, folder, "a", "0", interrupted=lambda: time.monotonic() > began + 0.5)
        assert time.monotonic() - began < 60.0
        assert [process.pid for process in of_run(preloaded.run_id) if process.pid != role.pid] == []
        assert until(lambda: role.ended() == 0, 60)


def test_imports_have_a_deadline(folder: Path) -> None:
    preloaded = Preloaded((PACKAGE,), (f"{PACKAGE}.slow",))
    preloaded.expect(1, 0.5)
    with contextlib.closing(preloaded):
        role = start(preloaded, folder, "a", "0")
        assert said(folder, "a")["forked"] is False
        assert until(lambda: role.ended() == 0, 60)


@pytest.mark.parametrize(
    "sections",
    [
        {"launch": {"backend": "ray", "host": "auto"}, "weights": {"channel": "zmq"}}, {"actors": {"engine": "vllm"}},
        {"actors": {"threads": 2}}, {"learner": {"threads": 2}},
    ],
    ids=["ray", "vllm", "the actors' threads", "the learner's threads"],
)  # fmt: skip
def test_what_a_fork_would_break_is_not_forked(sections: dict[str, Any]) -> None:
    assert not forkable(Config.model_validate(sections))


def test_a_machine_with_gpus_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "has_driver", lambda: False)
    assert forkable(Config())
    monkeypatch.setattr(preloaded, "has_driver", lambda: True)
    with preloading(Config()) as nothing:
        assert nothing is None


def ended(preloaded: Preloaded) -> bool:
    return preloaded._process.returncode is not None


def test_it_is_started_before_the_configuration_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "has_driver", lambda: False)
    with early(["quickstart"]) as started:
        assert started is not None
        with preloading(Config(), started) as taken:
            assert taken is started
            assert not ended(started)
        assert ended(started)
    with early(["quickstart"]) as started:
        assert started is not None
        with preloading(Config.model_validate({"actors": {"threads": 2}}), started) as taken:
            assert taken is None
            assert ended(started), "this configuration needs no forks"
    with early(["quickstart"]) as started:
        assert started is not None
    assert ended(started), "the command ended with an error"


def test_what_starts_no_role_starts_no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloaded, "has_driver", lambda: False)
    for words in ([], ["quickstart", "--dry-run"], ["quickstart", "--print=k8s"], ["--help"]):
        with early(words) as nothing:
            assert nothing is None
    monkeypatch.setattr(preloaded, "has_driver", lambda: True)
    with early(["quickstart"]) as nothing:
        assert nothing is None


def test_a_command_starts_it_before_its_own_imports() -> None:
    program = (
        "import os, sys; from asyncrl.launch.backends import preloaded\n"
        "preloaded.has_driver = lambda: False\n"
        "def start(self): print('asyncrl.config' in sys.modules, flush=True); os._exit(0)\n"
        "preloaded.Preloaded.__init__ = start\n"
        "from asyncrl.cli import main; main(['launch', 'quickstart'])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60) == "False\n"


def test_what_was_not_needed_is_ended(folder: Path) -> None:
    with forking() as preloaded:
        assert [process.pid for process in of_run(preloaded.run_id)] == [preloaded._process.pid]
    assert of_run(preloaded.run_id) == []


LAUNCHER = f"""
import time
from asyncrl.launch.backends.preloaded import Preloaded
preloaded = Preloaded(({PACKAGE!r},), ({PACKAGE + ".slow"!r},))
print(preloaded._process.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_a_process_that_still_imports_ends_with_its_launcher(folder: Path, after_s: float) -> None:
    """Before, it noticed at the end of its imports: half a minute on a busy machine."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    importing = psutil.Process(int(launcher.stdout.readline()))
    time.sleep(after_s)
    launcher.kill()
    launcher.communicate()
    try:
        assert until(lambda: not importing.is_running() or importing.status() == psutil.STATUS_ZOMBIE, 20.0)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            importing.kill()
