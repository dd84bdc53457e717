"""A checkpoint whose ledger is damaged is passed over; what is refused is told with the remedy."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.buffer.ledger.storage.database import LedgerFailed
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.rules import Refused
from tests.buffer.fakes import learner, open_buffer, play, step


def garbage(checkpoint: Path) -> None:
    (checkpoint / "buffer" / "ledger.sqlite").write_bytes(b"x" * 8192)


def cut_off(checkpoint: Path) -> None:
    ledger = checkpoint / "buffer" / "ledger.sqlite"
    ledger.write_bytes(ledger.read_bytes()[: ledger.stat().st_size // 2])


def one_page(checkpoint: Path) -> None:
    ledger = checkpoint / "buffer" / "ledger.sqlite"
    content = bytearray(ledger.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xff" * 64
    ledger.write_bytes(content)


def empty(checkpoint: Path) -> None:
    (checkpoint / "buffer" / "ledger.sqlite").write_bytes(b"")


def without_ledger(checkpoint: Path) -> None:
    (checkpoint / "buffer" / "ledger.sqlite").unlink()


def without_payloads(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "buffer" / "payloads")


def of_another_version(checkpoint: Path) -> None:
    with closing(sqlite3.connect(checkpoint / "buffer" / "ledger.sqlite")) as db:
        db.execute("PRAGMA user_version = 4")


def without_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [garbage, cut_off, one_page, empty, without_ledger, without_payloads, of_another_version, without_state]
)
def test_a_checkpoint_with_a_damaged_ledger_is_passed_over_for_an_older_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    live, checkpoints = tmp_path / "live", tmp_path / "checkpoints"
    buffer = open_buffer(live)
    incarnation = learner(buffer)
    for b in range(3):
        play(buffer)
        step(buffer, incarnation, b)
        folder = checkpoints / f"step-{b + 1}"
        folder.mkdir(parents=True)
        buffer.checkpointed(0, incarnation, b + 1, b + 1, folder)
        (folder / "state.json").write_text(json.dumps({"version": b + 1, "batch": b + 1, "branch": 0}))
    buffer.database.close()
    shutil.rmtree(live)
    damage(checkpoints / "step-3")
    assert restore(checkpoints, live) == checkpoints / "step-2"
    again = open_buffer(live)
    assert again.ledger.history.version == 2
    with pytest.raises(Refused) as refused:  # the learner then looks at the one before it
        again.start(3, 3, 0)
    assert refused.value.code == "unknown_checkpoint"
    assert again.start(2, 2, 0).branch == 1
    again.database.close()
    shutil.rmtree(live)
    for step_number in (1, 2):
        damage(checkpoints / f"step-{step_number}")
    for _ in range(2):  # what was begun is in the way of no second try
        with pytest.raises(LedgerFailed, match=r"step-3.*step-2.*step-1.*begin a new run") as failed:
            restore(checkpoints, live)
        assert "model.path" in str(failed.value)
        assert not (live / "ledger.sqlite").exists()


def test_a_damaged_ledger_of_the_run_itself_is_refused_with_the_remedy(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path / "live")
    learner(buffer)
    buffer.database.close()
    (tmp_path / "live" / "ledger.sqlite").write_bytes(b"x" * 8192)
    with pytest.raises(LedgerFailed, match=r"is damaged \(.*move the folder .*live away.*--resume") as failed:
        open_buffer(tmp_path / "live")
    assert "Everything acknowledged is kept" not in str(failed.value)
