"""The table of the roles of a run. Processes, backend and collector are fakes: no real process outlives a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.launch.processes import Role
from asyncrl.launch.supervision import process_table
from asyncrl.launch.supervision.process_table import ProcessTable
from asyncrl.run_folder import RunFolder

RANKS = ("learner", "learner-1", "learner-2", "learner-3")
ON_THE_LOST_NODE = RANKS[2:]


class FakeProcess:
    """Ends when all `awaited` have been killed, itself among them."""

    def __init__(self, role: Role, killed: list[str], awaited: tuple[str, ...]) -> None:
        self.role, self.identity, self.local = role, None, False
        self._killed, self._awaited = killed, awaited

    def kill(self, why: str) -> None:
        assert why == "learner-1 died"
        self._killed.append(self.role.name)

    def ended(self) -> int | None:
        return -9 if {self.role.name, *self._awaited} <= set(self._killed) else None


class FakeBackend:
    def __init__(self, awaited: tuple[str, ...]) -> None:
        self.started: list[tuple[str, bool]] = []
        self.killed: list[str] = []
        self._awaited = awaited

    def start(self, role: Role, *, again: bool = False) -> FakeProcess:
        self.started.append((role.name, again))
        return FakeProcess(role, self.killed, self._awaited)


class FakeCollector:
    def restarted(self, role: str, why: str) -> None:
        assert why == ("exit code 1" if role == "learner-1" else "learner-1 died")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder.create(tmp_path / "run", Config())
    yield made
    made.remove_temporary()


def started(run: RunFolder, awaited: tuple[str, ...]) -> tuple[ProcessTable, FakeBackend]:
    backend, collector = FakeBackend(awaited), FakeCollector()
    roles = [Role(name, ("none",), leader="" if name == "learner" else "learner") for name in RANKS]
    made: tuple[Any, Any] = backend, collector
    table = ProcessTable(run, roles, Config().launch, *made)
    table.start_all(lambda: False)
    return table, backend


def test_ranks_that_follow_a_dead_one_are_killed_together(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on a lost node may take seconds to end: these pass once for all of them, not for each."""
    monkeypatch.setattr(process_table, "KILL_S", 0.5)
    table, backend = started(run, awaited=ON_THE_LOST_NODE)
    table.restart("learner-1", "exit code 1")
    assert backend.killed == ["learner", "learner-2", "learner-3"]
    assert backend.started[len(RANKS) :] == [(name, True) for name in RANKS]


def test_ranks_that_no_kill_ends_are_named_and_none_is_started(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_table, "KILL_S", 0.0)
    table, backend = started(run, awaited=("nobody",))
    with pytest.raises(RunError, match=r"^learner, learner-2, learner-3: not ended although killed\.$"):
        table.restart("learner-1", "exit code 1")
    assert len(backend.started) == len(RANKS)
