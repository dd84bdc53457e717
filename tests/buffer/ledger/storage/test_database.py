from __future__ import annotations

import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.ledger.storage.database import Database, Fsync, LedgerFailed, refuse_network_filesystem
from asyncrl.buffer.ledger.storage.schema import READERS, VERSION, refusal
from asyncrl.buffer.rules import Refused
from asyncrl.errors import ConfigError, RunError
from tests.buffer.fakes import learner, open_buffer, play, put, step, trajectory


def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    first = Database(tmp_path)
    with pytest.raises(LedgerFailed, match="in use by another buffer process"):
        Database(tmp_path)
    first.close()
    Database(tmp_path).close()


def test_a_network_filesystem_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nhost:/x {tmp_path} nfs4 rw 0 0\n")
    with pytest.raises(ConfigError, match="network filesystem \\(nfs4\\)"):
        refuse_network_filesystem(tmp_path / "buffer", str(mounts))
    refuse_network_filesystem(Path("/elsewhere"), str(mounts))


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    """In a process of another user, since root may write anywhere."""
    source = f"""
import os
from pathlib import Path
from asyncrl.buffer.ledger.storage.database import Database, LedgerFailed
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    Database(Path({str(tmp_path)!r}) / "buffer")
except LedgerFailed as error:
    print(error)
"""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder not in map(Path, ("/", "/tmp")):
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (
        f"{tmp_path}/buffer cannot be written: Permission denied. Make it writable, or set buffer.dir.\n"
    )


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "buffer").write_text("a file")
    with pytest.raises(LedgerFailed, match="buffer cannot be written"):
        Database(tmp_path / "buffer")


@pytest.mark.parametrize("fsync", ["commit", "interval", "off"])
def test_every_commit_is_there_after_the_process_is_gone(tmp_path: Path, fsync: Fsync) -> None:
    database = Database(tmp_path, fsync, fsync_interval_s=0.5)
    for now in range(6):
        database.set("n", str(now))
        database.commit(now / 4)
    database.set("n", "not committed")
    database.close()
    again = Database(tmp_path, fsync)
    assert again.get("n") == "5"
    again.close()


def test_what_an_interval_leaves_is_flushed_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path, "interval", fsync_interval_s=10)
    flushed: list[str] = []

    def note(fd: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", note)

    def flushed_at(now: float) -> list[str]:
        """A thread flushes; the commit that finds it done says so."""
        deadline = time.monotonic() + 10
        database.commit(now)
        while database.unflushed and time.monotonic() < deadline:
            time.sleep(0.01)
            database.commit(now)
        done = flushed[:]
        flushed.clear()
        return done

    both = ["00000000.segment", "ledger.sqlite-wal"]
    database.set("n", "1")
    assert flushed_at(0) == both  # the first commit is due at once
    database.set("n", "2")
    database.commit(5)
    database.commit(9)
    assert database.unflushed
    assert flushed == []
    assert flushed_at(11) == both
    database.set("n", "3")
    database.commit(12)
    database.commit(math.inf)  # the end: it waits
    assert flushed == both
    assert not database.unflushed
    database.close()


def test_another_version_of_the_tables_is_refused(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerFailed, match="version 99 of the tables"):
        Database(tmp_path)


def test_a_ledger_of_the_earlier_version_is_refused_with_the_asyncrl_that_can_finish_it(tmp_path: Path) -> None:
    Database(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION - 1}")
    db.close()
    before = (tmp_path / "ledger.sqlite").read_bytes()
    for _ in range(2):  # a refusal leaves no lock behind
        with pytest.raises(LedgerFailed) as refused:
            Database(tmp_path)
        sentence = str(refused.value)
        assert sentence.endswith(
            f"it has version {VERSION - 1} of the tables, this asyncrl reads {VERSION}: finish the run with asyncrl "
            f"{READERS[VERSION - 1]}."
        )
        assert "--resume" not in sentence, "this asyncrl cannot resume it"
    assert (tmp_path / "ledger.sqlite").read_bytes() == before
    with pytest.raises(RunError) as unread:
        read_ledger(tmp_path)
    assert str(unread.value).endswith(f"finish the run with asyncrl {READERS[VERSION - 1]}.")


def test_the_version_that_began_a_run_is_asked_for_where_no_reader_is_known() -> None:
    assert refusal(99).endswith("finish the run with the asyncrl that began it.")


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    play(buffer)
    buffer.commit(0)
    buffer.database.close()
    path = tmp_path / "ledger.sqlite"
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096, 2):
            file.seek(page * 4096)
            file.write(os.urandom(2048))
    with pytest.raises(LedgerFailed, match=r"ledger\.sqlite is damaged"):
        open_buffer(tmp_path)


@pytest.mark.parametrize("where", ["segment", "ledger"])
def test_a_truncated_tail_keeps_every_commit_before_it(tmp_path: Path, where: str) -> None:
    """A power cut: the end of the last segment, or of the write-ahead log, never reached the disk."""
    source, target = tmp_path / "run", tmp_path / "after"
    buffer = open_buffer(source)
    learner(buffer)
    tickets = buffer.issue(0, "a", (0, 0), 4)[0]
    put(buffer, trajectory(tickets[0]))
    put(buffer, trajectory(tickets[1]))
    buffer.commit(0.1)
    put(buffer, trajectory(tickets[2]))
    buffer.commit(0.2)
    (target / "payloads").mkdir(parents=True)
    for path in [*source.glob("ledger.sqlite*"), *source.glob("payloads/*")]:
        (target / path.relative_to(source)).write_bytes(path.read_bytes())
    cut = target / "payloads" / "00000000.segment" if where == "segment" else target / "ledger.sqlite-wal"
    os.truncate(cut, cut.stat().st_size - 50)
    again = open_buffer(target)
    learner(again)
    assert again.ledger.live[0].state == "waiting"
    assert again.ledger.live[1].stored == [None, None]
    assert again.lost_to_disk == (where == "segment")
    assert put(again, trajectory(tickets[2])) == "stored"
    again.database.close()
    buffer.database.close()


def test_a_trained_batch_whose_payload_is_gone_says_so(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    buffer.commit(0)
    buffer.database.close()
    os.truncate(tmp_path / "payloads" / "00000000.segment", 10)
    again = open_buffer(tmp_path)
    assert again.lost_to_disk == 4  # two groups waited; the two that were trained cannot come back
    with pytest.raises(Refused, match="batch 0 cannot be handed out again") as refused:
        learner(again)
    assert refused.value.code == "payload_lost"
    assert learner(again, fresh=True) == 2
    counted = again.ledger.account.equation(0)
    assert (counted["dropped: discarded_branch"], counted["in_flight"]) == (2, 2), "those that waited are played again"
    again.database.close()
