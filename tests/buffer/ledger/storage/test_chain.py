"""The chain of commits: it gives the tables again, and goes on in every copy of the ledger."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.audit.chain import read_head
from asyncrl.audit.checks.chain import chain
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import SnapshotHead
from asyncrl.buffer.ledger.storage.chain import LONGEST
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.errors import RunError
from tests.buffer.fakes import learner, open_buffer, play, reopen, step


def said(folder: Path, *snapshots: SnapshotHead) -> list[str]:
    return list(chain(read_ledger(folder), snapshots))


def write(folder: Path, *values: str) -> None:
    database = Database(folder)
    for n, value in enumerate(values):
        database.set(f"key {n}", value)
    database.commit(0)
    database.close()


def test_it_goes_on_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    for value in ("a", "b", "c"):
        write(tmp_path, value)
    assert [commit.seq for commit in read_ledger(tmp_path).chain.commits] == [1, 2, 3]  # type: ignore[union-attr]
    assert said(tmp_path) == []


def test_what_was_not_committed_is_not_in_it(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.set("key", "a")
    database.commit(0)
    database.set("key", "b")
    database.close()
    write(tmp_path, "c")
    assert said(tmp_path) == []


def test_a_long_value_stands_there_as_its_digest_and_a_change_of_it_is_named(tmp_path: Path) -> None:
    write(tmp_path, "x" * 100_000, "y" * LONGEST)
    commits = read_ledger(tmp_path).chain.commits  # type: ignore[union-attr]
    assert sum(len(commit.changes) for commit in commits) < 2 * LONGEST
    assert said(tmp_path) == []
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE kv SET value = ? WHERE key = 'key 0'", ("x" * 99_999 + "y",))
    (problem,) = said(tmp_path)
    assert problem.startswith("kv (key key 0) has value 'xxx")


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE commits SET head = 'x' WHERE seq = 1", "commit 1 has head x; the commits up to it make"),
        ("UPDATE commits SET changes = substr(changes, 1, 20) WHERE seq = 2", "commit 2 cannot be applied again"),
        ("DELETE FROM commits WHERE seq = 1", "commit 1 is missing from the ledger"),
        ("DELETE FROM commits WHERE seq = 2", "kv (key key 0) has value 'b', 'a' was committed"),
        ("DELETE FROM kv", "kv (key key 0) is missing, and was committed"),
        ("INSERT INTO kv VALUES ('other', 'x')", "kv (key other) was never committed"),
    ],
)
def test_every_change_is_named(tmp_path: Path, statement: str, what: str) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute(statement)
    assert any(text.startswith(what) for text in said(tmp_path))


def test_a_value_of_another_type_is_told_by_name_of_the_ledger(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    play(buffer)
    buffer.commit(0)
    buffer.database.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE trajectories SET versions = 99.5")
    with pytest.raises(RunError, match=r"ledger\.sqlite cannot be read"):
        read_ledger(tmp_path)


def test_a_lost_trajectory_and_the_one_that_replaces_it_are_in_it(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    play(buffer)
    group = next(iter(buffer.ledger.live.values()))
    buffer.ledger.lose(group, 0)
    buffer.commit(0)
    buffer.database.close()
    assert said(tmp_path) == []


@pytest.mark.parametrize(
    "statement",
    [
        "ATTACH DATABASE '{made}' AS made",
        "VACUUM INTO '{made}'",
        "CREATE TABLE made (a)",
        "CREATE TRIGGER made AFTER INSERT ON kv BEGIN DELETE FROM groups; END",
        "DROP TABLE kv",
        "PRAGMA writable_schema = 1",
        "COMMIT",
    ],
)
def test_a_recorded_statement_may_do_nothing_but_change_rows(tmp_path: Path, statement: str) -> None:
    """Whoever sends a run folder gets no statement executed that reaches beyond the rows of the tables."""
    database = Database(tmp_path / "run")
    database._chain.note(statement.format(made=tmp_path / "made"), ())
    database.set("key", "a")
    database.commit(0)
    database.close()
    assert any("cannot be applied again" in text for text in said(tmp_path / "run"))
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_ends_with_a_commit_of_the_run_also_after_the_host_was_lost(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    buffer = open_buffer(folder)
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer)
        step(buffer, incarnation, b)
        if b < 2:
            (path := checkpoints / f"step-{b}").mkdir(parents=True)
            buffer.checkpointed(0, incarnation, b + 1, b + 1, path)
            (path / "state.json").write_text(f'{{"branch": 0, "batch": {b + 1}}}')
    heads = [
        SnapshotHead(f"step-{b}", 0, b + 1, *read_head(checkpoints / f"step-{b}" / "buffer" / "ledger.sqlite"))
        for b in range(2)
    ]
    buffer = reopen(buffer, folder)
    buffer.database.close()
    assert said(folder, *heads) == []
    exchanged = SnapshotHead("step-1", 0, 2, *read_head(checkpoints / "step-0" / "buffer" / "ledger.sqlite"))
    assert said(folder, exchanged) == ["step-1/buffer has 1 finished batches; the learner had done 2"]
    other = SnapshotHead("step-1", 0, 2, heads[1].seq, heads[0].head, 2)
    assert "step-1/buffer ends with commit" in said(folder, other)[0]

    restored = tmp_path / "elsewhere"
    restore(checkpoints, restored)
    assert said(restored, *heads) == []
    buffer = open_buffer(restored)
    learner(buffer, 2, 2, branch=0)
    buffer.commit(0)
    buffer.database.close()
    assert said(restored, *heads) == [], "it goes on with the chain of the copy"
