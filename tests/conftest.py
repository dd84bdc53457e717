from __future__ import annotations

import contextlib
import gc
import importlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

gc.disable()  # imports and collected tests are not garbage: looking through them takes a third of the collection's time

BEGUN_FIRST = ("test_whole_loop.py", "test_synchronous.py", "test_interleavings.py", "test_changing.py")
"""Files of few tests and many seconds: begun last, one of them would go on alone while the other workers are done."""

WHOLE_RUN_S = 400.0
"""What a test marked `system` may take. It is a bound on hanging: on a slow machine a whole run takes minutes."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a new clone each module is compiled first, a test with its assertions rewritten: half the time of collection.
    Each worker begins with modules of its own, and finds compiled what the others began with."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    files = sorted((session.config.rootpath / "tests").rglob("test_*.py"))
    for path in files[len(files) * number // count : len(files) * (number + 1) // count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection imports it again, and reports it
            importlib.import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in BEGUN_FIRST)
    for item in items:
        if item.get_closest_marker("system") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUN_S))


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: from here on a collection of garbage passes it over."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """A script's job in the background ignores SIGINT, and so would every process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long one example takes says how busy the machine is: pytest's own timeout is the bound.
    settings.register_profile("asyncrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("asyncrl")


@pytest.fixture(autouse=True)
def no_sockets_or_weights_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run without a launcher has nobody who removes its folders for sockets and weights."""
    opened: list[RunFolder] = []
    open_run = RunFolder.open

    def remember(run: RunFolder) -> None:
        open_run(run)
        opened.append(run)

    monkeypatch.setattr(RunFolder, "open", remember)
    yield
    for run in opened:
        if (run.path / "run.json").is_file():
            run.remove_temporary()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of a run that the test launches; processes that it left are ended."""
    run = RunFolder(tmp_path / "run")
    yield run
    if (run.path / "run.json").is_file():
        kill_all(of_run(run.id))
        run.remove_temporary()


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Begins a run of long episodes (tests/long_run.py) in the test's folder; it is killed at the end of the test."""
    begun: list[Any] = []

    def begin(*about: Any, **options: Any) -> Any:
        from tests.long_run import LongRun  # it imports torch

        begun.append(LongRun(tmp_path, *about, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()
