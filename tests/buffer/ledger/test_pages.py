"""Pages are committed rows, whole groups, within their bounds; the table made of them is tested in tests/view."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.buffer.ledger import pages as module
from asyncrl.buffer.ledger.pages import Pages
from asyncrl.errors import RunError
from tests.buffer.fakes import learner, open_buffer, play, step


def test_what_is_not_committed_is_not_seen(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    buffer.commit(0.0)
    pages = Pages(tmp_path / "ledger.sqlite")
    before = pages.page(0, 0)
    play(buffer, 4)
    assert pages.page(0, 0) == before
    assert pages.location(0, 0) is None
    buffer.commit(0.0)
    after = pages.page(0, 0)
    assert len(after.trajectories) == 4
    assert pages.location(0, 0) is not None
    pages.close()
    buffer.database.close()


def test_a_page_holds_whole_groups_up_to_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TRAJECTORIES", 5)
    monkeypatch.setattr(module, "MOST_BATCHES", 2)
    buffer = open_buffer(tmp_path)
    incarnation = learner(buffer)
    for b in range(4):
        play(buffer)
        step(buffer, incarnation, b)
    buffer.commit(0.0)
    pages, at, groups, batches = Pages(tmp_path / "ledger.sqlite"), 0, [], 0
    while at is not None:
        page = pages.page(at, batches)
        assert len(page.trajectories) <= 5
        assert len(page.batches) <= 2
        groups += [group.number for group in page.groups]
        assert {t.group for t in page.trajectories} <= {group.number for group in page.groups}
        batches = max([batches, *(batch.serial + 1 for batch in page.batches)])
        at = page.next
    assert groups == sorted(set(groups))
    assert len(groups) >= 8
    monkeypatch.setattr(module, "MOST_TRAJECTORIES", 1)
    assert len(pages.page(0, 0).groups) == 1, "the first group comes whole, however large it is"
    pages.close()
    buffer.database.close()


def test_a_reclaimed_payload_has_no_place(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    learner(buffer)
    play(buffer, 2)
    buffer.database.write("UPDATE groups SET payload = 0")
    buffer.commit(0.0)
    pages = Pages(tmp_path / "ledger.sqlite")
    assert pages.location(0, 0) is None
    assert pages.page(0, 0).groups[0].payload is False
    pages.close()
    buffer.database.close()


def test_nothing_can_be_written_through_it(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path)
    pages = Pages(tmp_path / "ledger.sqlite")
    with pytest.raises(Exception, match="readonly"):
        pages._db.execute("DELETE FROM groups")
    pages.close()
    buffer.database.close()


def test_a_ledger_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no ledger"):
        Pages(tmp_path / "ledger.sqlite")
    (tmp_path / "ledger.sqlite").write_bytes(b"x" * 9000)
    with pytest.raises(RunError, match="file is not a database"):
        Pages(tmp_path / "ledger.sqlite")
