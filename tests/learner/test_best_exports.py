"""Which exports stay as results come: none that is written is taken for one that is there, and best.json names one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.buffer.client import EvalReply
from asyncrl.config import Config
from asyncrl.learner.checkpoints.exports import Exports

Result = tuple[int, int, float]


class FakeRun:
    """The parts of a session that exports need; `hold` keeps what is being written from its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "exports"
        config = Config.model_validate({"eval": {"every": 10, "tasks": 4, "keep_best": "held_out"}})
        self.session: Any = SimpleNamespace(config=config, version=0, ranks=SimpleNamespace(order=lambda order: None))
        self.free = threading.Event()
        self.free.set()
        backend: Any = SimpleNamespace(weights=lambda: iter([("weight", torch.zeros(2))]))
        self.exports = Exports(self.session, backend, self.folder, lambda path: _wait(self.free))

    def look(self, version: int, results: Sequence[Result], undecided: Sequence[tuple[int, int]] = ()) -> None:
        """The learner stands at `version`; `results` are sorted from the best on."""
        self.session.version = version
        self.exports.take(EvalReply(True, None, 0, 0, [], "", results=results, undecided=undecided))

    def evaluated(self, version: int, results: Sequence[Result], branch: int = 0) -> None:
        """These weights are exported while they are evaluated, with `results` at the end."""
        before = [each for each in results if each[:2] != (branch, version)]
        self.look(version, before, [(branch, version)])
        self.exports.settle()
        self.look(version, results)

    def checkpoint(self, version: int) -> None:
        (self.folder.with_name("checkpoints") / f"step-{version:06d}").mkdir(parents=True)

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.folder.glob("*step-*")}

    @property
    def best(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "best.json").read_text()))


def _wait(free: threading.Event) -> None:
    assert free.wait(30)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    made = FakeRun(tmp_path)
    yield made
    made.free.set()
    made.exports.settle()


FIRST: Result = (0, 10, 0.9)
SECOND: Result = (0, 20, 0.5)


@pytest.mark.parametrize("how", ["next look", "end"])
def test_an_export_that_is_written_when_its_evaluation_ends_is_removed_once_it_is_complete(
    run: FakeRun, how: str
) -> None:
    run.evaluated(10, [FIRST])
    run.free.clear()
    run.look(20, [FIRST], [(0, 20)])
    run.look(21, [FIRST, SECOND])  # not the best, and still being written
    assert run.there == {"step-000010", ".unfinished-step-000020"}
    run.free.set()
    if how == "end":
        run.exports.close()
    else:
        run.exports.settle()
        run.look(22, [FIRST, SECOND])
    assert run.there == {"step-000010"}
    assert run.best["export"] == "step-000010"


def test_best_json_names_the_best_export_that_is_complete(run: FakeRun) -> None:
    run.evaluated(10, [(0, 10, 0.5)])
    run.free.clear()
    run.look(20, [(0, 20, 0.9), (0, 10, 0.5)])  # the evaluation ended before the learner looked
    assert run.best["export"] == "step-000010"
    run.free.set()
    run.exports.close()
    assert (run.best["export"], run.there) == ("step-000020", {"step-000020"})
    assert "without_export" not in run.best


def test_results_without_exports_end_no_learner_and_the_best_of_those_that_have_one_is_named(run: FakeRun) -> None:
    """eval.keep_best was set for a --resume, or the run is a fork: the ledger has results of earlier versions."""
    run.look(12, [FIRST])
    assert not (run.folder / "best.json").exists()
    run.evaluated(20, [FIRST, SECOND])
    assert run.there == {"step-000020"}
    assert (run.best["export"], run.best["success"]) == ("step-000020", 0.5)
    assert run.best["without_export"] == {"branch": 0, "version": 10, "success": 0.9}
    run.evaluated(30, [FIRST, (0, 30, 0.7), SECOND])
    assert (run.best["export"], run.there) == ("step-000030", {"step-000030"})


def test_best_json_goes_with_the_last_result_on_the_line(run: FakeRun) -> None:
    run.evaluated(10, [FIRST])
    run.look(5, ())
    assert run.there == set()
    assert not (run.folder / "best.json").exists()


def test_the_best_up_to_each_checkpoint_stays_because_a_branch_may_begin_there(run: FakeRun) -> None:
    early, late = (0, 10, 0.5), (0, 20, 0.9)
    run.checkpoint(15)
    run.evaluated(10, [early])
    run.evaluated(20, [late, early])
    assert (run.best["export"], run.there) == ("step-000020", {"step-000010", "step-000020"})
    run.look(15, [early])  # a fresh start at the checkpoint
    assert (run.best["export"], run.there) == ("step-000010", {"step-000010"})


def test_a_redo_writes_the_best_up_to_where_it_stands(run: FakeRun) -> None:
    """It may end in a branch, on which this is the best again."""
    results = [(0, 20, 0.9), (0, 10, 0.5)]
    run.checkpoint(5)
    run.evaluated(10, results[1:])
    run.evaluated(20, results)
    assert run.there == {"step-000020"}
    for version in (5, 10, 15):
        run.look(version, results)
    run.exports.settle()
    assert (run.best["export"], run.there) == ("step-000020", {"step-000010", "step-000020"})
    run.look(25, results)
    assert run.there == {"step-000020"}
