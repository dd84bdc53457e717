"""Answers of held-out tasks: which are kept, within which bound, and what a kill or a full disk leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.buffer.core import Buffer
from asyncrl.buffer.record import from_record
from asyncrl.config.held_out import HeldOutSet
from asyncrl.errors import RunError
from asyncrl.launch.run import open_run
from asyncrl.tracking.rollouts import held_out
from asyncrl.tracking.rollouts.held_out import Answers
from tests.buffer.fakes import learner, open_buffer, play, put, step, trajectory

SETS = (HeldOutSet("few", 3, 1, True, 1.0), HeldOutSet("cold", 1, 2, False, 0.5))


def evaluated(tmp_path: Path, answers: Answers, steps: int = 2) -> Buffer:
    """A buffer whose every step is evaluated by the one actor."""
    buffer = open_buffer(tmp_path / "ledger", eval_sets=SETS, eval_every=1, answers=answers)
    incarnation = learner(buffer)
    for b in range(steps):
        play(buffer)
        step(buffer, incarnation, b)
        for place, ticket in enumerate(buffer.issue(0, "actor-0", (0, b + 1), 99)[0]):
            assert put(buffer, trajectory(ticket, (b + 1,), place / 8, tokens=8)) == "stored"
    return buffer


def kept(folder: Path) -> list[tuple[str, int, int, bool, int]]:
    return [(a.set, a.task, a.index, a.greedy, a.due) for a in held_out.read_all(folder)]


def test_the_first_tasks_of_every_set_are_kept_at_every_evaluation(tmp_path: Path) -> None:
    evaluated(tmp_path, Answers(tmp_path / "kept", 2, 10.0))
    of_one = [("few", 0, 0, False), ("few", 0, 1, True), ("few", 1, 0, False), ("few", 1, 1, True)]
    of_one += [("cold", 0, 0, False), ("cold", 0, 1, False)]
    assert kept(tmp_path / "kept") == [(*each, due) for due in (1, 2) for each in of_one]
    first = next(held_out.read_all(tmp_path / "kept"))
    assert (first.task_id, first.version, first.reward) == ("held-out-0", (0, 1), 0.0)
    assert from_record(first.payload).rows[0].versions.tolist() == [-1, -1, *[1] * 8]
    for path in (tmp_path / "kept").iterdir():
        assert path.stat().st_mode & 0o077 == 0, "only its owner can read a model's text"


def test_none_is_kept_when_none_is_asked_for(tmp_path: Path) -> None:
    evaluated(tmp_path, Answers(tmp_path / "kept", 0, 10.0))
    assert not (tmp_path / "kept").exists()


def test_the_size_is_bounded_and_what_stays_is_spread_over_the_run(tmp_path: Path) -> None:
    most = 0.012
    evaluated(tmp_path, Answers(tmp_path / "kept", 2, most), steps=12)
    sizes = [path.stat().st_size for path in (tmp_path / "kept").iterdir()]
    assert sum(sizes) <= most * 1e6
    assert max(sizes) <= most * 1e6 / 8
    due = [int(path.stem.partition("-")[2]) for path in sorted((tmp_path / "kept").iterdir())]
    assert (due[0], due[-1], 3 < len(due) < 12) == (1, 12, True)


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "kept", 2, 10.0)
    evaluated(tmp_path, answers, steps=1)
    path = tmp_path / "kept" / "0000-00000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    about = held_out.abouts(path)[0][0]
    assert len(held_out.abouts(path)) == len(lines) - 1
    answers.add(about, b"again")
    assert next(a.payload for a in held_out.read_all(tmp_path / "kept") if a.set == "few") == b"again"
    newer = json.loads(lines[0]) | {"format": 99}
    path.write_text(json.dumps(newer) + "\n")
    assert held_out.abouts(path) == []
    with pytest.raises(RunError, match="holds no answer at byte 3"):
        held_out.answer(path, 3)


def test_a_full_disk_leaves_answers_out_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(held_out, "_append", full)
    buffer = evaluated(tmp_path, Answers(tmp_path / "kept", 2, 10.0))
    assert [s.state for s in buffer.evaluation().sets] == ["done"] * 4
    assert sum("tracking.held_out" in record.message for record in caplog.records) == 1


def test_the_answers_of_a_run_are_read_with_their_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.config import Config
    from asyncrl.run_folder import RunFolder

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = RunFolder.create(tmp_path / "run", Config())
    evaluated(tmp_path, Answers(run.held_out, 1, 10.0), steps=1)
    opened = open_run(run.path)
    texts = {(a.set, a.index): opened.text_of(a) for a in opened.held_out()}
    assert texts.keys() == {("few", 0), ("few", 1), ("cold", 0), ("cold", 1)}
    assert all(texts.values())
