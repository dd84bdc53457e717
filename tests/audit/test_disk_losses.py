"""A start that is refused changes nothing; a loss that no power cut explains stays a violation."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest
import yaml

from asyncrl.audit.command import audit
from asyncrl.buffer.core import Buffer
from asyncrl.buffer.ledger.storage.database import Database
from asyncrl.buffer.rules import Refused, Rules
from asyncrl.buffer.tasks.sources import open_source
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.run_folder import RunFolder


def dump(run: RunFolder) -> list[str]:
    with closing(sqlite3.connect(f"file:{run.buffer}/ledger.sqlite?mode=ro", uri=True)) as db:
        return list(db.iterdump())


def resumed(run: RunFolder) -> int:
    """The buffer opens, and a learner starts from the newest checkpoint, as under `--resume`; gives its first batch."""
    config = run.load_config()
    database = Database(run.ledger(config), config.buffer.fsync)
    try:
        buffer = Buffer(database, Rules.of(config), open_source(config), 0.0)
        buffer.commit(0.0)
        buffer.joined("actor-0")
        state = read_list(complete(run.checkpoints)[-1])[0]
        try:
            return buffer.start(state.batch, state.version, state.branch).batch
        finally:
            buffer.commit(0.0)
    finally:
        database.close()


def without_payloads(run: RunFolder, newest: int, fsync: str, keep: str) -> list[str]:
    """Removes them, and the checkpoints after version `newest`; returns what the ledger holds."""
    config = yaml.safe_load(run.config.read_text())
    config.setdefault("buffer", {}).update(fsync=fsync, keep=keep)
    run.config.write_text(yaml.safe_dump(config))
    for path in complete(run.checkpoints):
        if read_list(path)[0].version > newest:
            shutil.rmtree(path)
            forget(run, path.name)
    assert audit(run) == 0
    before = dump(run)
    for path in (run.buffer / "payloads").glob("*.segment"):
        path.unlink()
    assert audit(run) == 1
    return before


def forget(run: RunFolder, checkpoint: str) -> None:
    """The learner was killed before the checkpoint was complete, and did not report it."""
    events = run.path / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not ('"kind": "checkpoint"' in line and checkpoint in line)]
    assert len(kept) < len(lines)
    events.write_text("".join(kept))


@pytest.mark.parametrize(
    ("newest", "fsync", "keep"), [(2, "interval", "all"), (2, "interval", "needed"), (4, "commit", "all")]
)
@pytest.mark.system
def test_a_resume_that_is_refused_leaves_the_audit_red(run: RunFolder, newest: int, fsync: str, keep: str) -> None:
    """2: batches have to be done again. 4: none has, but the mode loses nothing."""
    before = without_payloads(run, newest, fsync, keep)
    with pytest.raises(Refused, match=r"Nothing was changed\. Put the files of .* back; or move") as refused:
        resumed(run)
    assert refused.value.code == "payload_lost"
    assert audit(run) == 1
    assert dump(run) == before


def test_what_a_checkpoint_covers_no_power_cut_takes(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody needs it any more: the start succeeds, and the audit stays red."""
    without_payloads(run, 4, "interval", "all")
    violations = capsys.readouterr().out
    assert resumed(run) == 4
    assert audit(run) == 1
    said = capsys.readouterr().out
    assert said.count("is missing: there is no segment") == violations.count("is missing: there is no segment") == 16
    assert "host 0, disk 0" in said
