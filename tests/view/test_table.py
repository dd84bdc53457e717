"""The table of the viewer against the ledger as the audit reads it, with code of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.ledger.pages import Pages
from asyncrl.view.table import COLUMNS, Rows, table
from tests.audit.histories.batches import awaited, forked, interrupted
from tests.audit.simulated import Simulated
from tests.view.made_run import MadeRun


def made(folder: Path) -> MadeRun:
    run = MadeRun(folder / "run")
    for number in range(4):
        run.step(fail=number % 3)
    return run


def read(folder: Path, limit: int) -> Rows:
    """All pages, from the last settled group on, as the viewer asks for them."""
    rows, pages, group, batch = Rows(), Pages(folder / "ledger.sqlite"), 0, 0
    while True:
        page = pages.page(group, batch, limit)
        assert len(page.groups) <= limit
        rows.add(page)
        batch = max(rows.batches, default=-1) + 1
        if page.next is None:
            pages.close()
            return rows
        group = page.next


def expected(ledger: LedgerRows, key: tuple[int, int]) -> dict[str, Any]:
    group, t = ledger.groups[key[0]], ledger.trajectories[key]
    used = [batch for batch in ledger.batches if group.number in batch.groups and not batch.released]
    last = used[-1] if used else None
    attempts = ledger.attempts.get(key, [])
    issued = next((a.issued_at for a in attempts if a.attempt == t.attempt), None)
    return {
        "group": group.number, "index": t.index, "batch": last and last.b, "branch": group.branch,
        "step": last.version_after if last and last.outcome == "applied" else None,
        "task": group.task_id, "env": t.env, "reward": t.reward, "stop": t.stop_reason, "turns": t.turns,
        "staleness": None if last is None else last.version - t.oldest, "tokens": t.tokens,
        "policy_tokens": t.policy_tokens, "state": group.state, "reason": group.reason, "actor": t.actor,
        "attempt": t.attempt, "oldest": t.oldest, "newest": t.newest,
        "played_s": None if issued is None else t.received_at - issued,
        "waited_s": None if last is None else last.fixed_at - t.received_at,
        "uses": [[b.serial, b.b, b.branch, b.outcome, b.released] for b in ledger.batches if key[0] in b.groups],
        "failures": sum(a.ended == "failed" for a in attempts), "payload": group.payload, "weight": group.weight,
    }  # fmt: skip


@pytest.mark.parametrize("history", [interrupted, forked, awaited])
@pytest.mark.parametrize("limit", [1, 3, 128])
def test_the_table_is_the_ledger_s(history: Callable[[Path], Simulated], limit: int, tmp_path: Path) -> None:
    run = history(tmp_path)
    run.buffer.commit(run.now)
    ledger = read_ledger(tmp_path)
    found = {(row[0], row[1]): dict(zip(COLUMNS, row, strict=True)) for row in table(read(tmp_path, limit))}
    run.buffer.database.close()
    assert {key for key, row in found.items() if row["reward"] is not None} == set(ledger.trajectories)
    for key in ledger.trajectories:
        row = found[key]
        assert {name: row[name] for name in COLUMNS if name != "error"} == expected(ledger, key)
    failed = {key for key, attempts in ledger.attempts.items() if any(a.ended == "failed" for a in attempts)}
    assert {key for key, row in found.items() if row["failures"]} == failed


def test_a_ticket_that_only_failed_is_a_row_with_its_reason(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    (ticket, *_) = run.issue(1)
    run.buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "the server said <b>503</b>")
    run.buffer.commit(0.0)
    (row,) = table(read(run.run.buffer, 10))
    found = dict(zip(COLUMNS, row, strict=True))
    run.close()
    assert (found["reward"], found["failures"], found["payload"]) == (None, 1, False)
    assert "the server said <b>503</b>" in found["error"]


@pytest.mark.parametrize("history", [interrupted, forked])
def test_taking_what_is_new_is_taking_all(history: Callable[[Path], Simulated], tmp_path: Path) -> None:
    """Pages from `unsettled` on, on top of what was known at any earlier moment, give what reading from 0 gives."""
    run = history(tmp_path)
    before = read(tmp_path, 128)
    for _ in range(2):
        run.rounds(1)
        run.buffer.commit(run.now)
        pages = Pages(tmp_path / "ledger.sqlite")
        before.add(pages.page(*before.unsettled))
        pages.close()
        assert table(before) == table(read(tmp_path, 128))
    run.buffer.database.close()


def test_a_batch_is_found_from_a_later_branch(tmp_path: Path) -> None:
    run = forked(tmp_path)
    run.buffer.commit(run.now)
    rows, ledger = read(tmp_path, 128), read_ledger(tmp_path)
    run.buffer.database.close()
    assert len(ledger.branches) == 2
    for branch in ledger.branches:
        for b in range(5):
            mine, theirs = rows.batch_of(branch, b), ledger.batch_of(branch, b)
            assert (mine and mine.serial) == (theirs and theirs.serial)
    assert [batch.serial for batch in rows.line] == [batch.serial for batch in ledger.line]
