"""Scores of a teacher on servers in the audit: what each witness would miss, and what a fork takes along."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.scorer_logs import read_score_log, read_score_logs
from asyncrl.audit.witnesses import Evidence, with_checkpoints
from asyncrl.buffer.client.messages import GroupLease
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.ledger.witnessed import read_witnessed
from asyncrl.launch.origins import inherit_logs
from tests.audit.histories.batches import taught
from tests.audit.simulated import Simulated
from tests.audit.test_lost_turns import lose_host
from tests.buffer.scoring.fakes import SCORED


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    found = taught(tmp_path).evidence()
    assert list(violations(found)) == []
    assert len(found.scorers["scorer-0"].puts) > 5
    return found


def noticed(evidence: Evidence, check: str = "scores") -> list[str]:
    return [each.what for each in violations(evidence) if each.check == check]


def test_a_log_that_is_gone_cut_or_changed_is_noticed(evidence: Evidence, tmp_path: Path) -> None:
    log = tmp_path / "scores" / "scorer-0.jsonl"
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    for changed in (b"", b"".join(lines[:-2]), whole.replace(b'"teacher": "t1"', b'"teacher": "t2"', 1), whole[30:]):
        log.write_bytes(changed)
        assert noticed(replace(evidence, scorers=read_score_logs(log.parent))), changed[:50]
    log.write_bytes(b"".join(lines[:-1]))
    assert not read_score_log(log).damaged, "a killed scorer lacks at most its last acknowledgement"


def test_another_teacher_is_noticed(evidence: Evidence) -> None:
    assert noticed(replace(evidence, teacher="t9")) == ["scores are of 2 teachers: t1, t9"]
    done = [replace(each, teacher="t9") for each in evidence.lists[-1].done]
    assert noticed(replace(evidence, lists=[replace(evidence.lists[-1], done=done)]))


def test_a_payload_that_was_changed_is_noticed(evidence: Evidence, tmp_path: Path) -> None:
    row = evidence.ledger.tables["scores"][-1]
    segment = tmp_path / "payloads" / f"{row['segment']:08d}.segment"
    content = bytearray(segment.read_bytes())
    content[row["start"] + row["bytes"] - 1] ^= 1
    segment.write_bytes(bytes(content))
    assert f"the scores of group {row['grp']} cannot be read" in noticed(evidence)[0]
    record = bytes(content[row["start"] : row["start"] + row["bytes"]])
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:
        db.execute("UPDATE scores SET checksum = ? WHERE grp = ?", (checksum(record), row["grp"]))
    assert "have digest" in noticed(replace(evidence, ledger=read_ledger(tmp_path)))[0]


def test_the_learners_list_covers_the_scores(evidence: Evidence) -> None:
    used = evidence.ledger.tables["score_uses"]
    changed = [row | {"digest": "0" * 32} for row in used]
    ledger = replace(evidence.ledger, tables=evidence.ledger.tables | {"score_uses": changed})
    assert noticed(replace(evidence, ledger=ledger), "learner")


@pytest.mark.parametrize("step", ["step-000001", "step-000002"])
def test_a_fork_takes_the_scorers_log_up_to_what_its_ledger_knows(
    evidence: Evidence, tmp_path: Path, step: str
) -> None:
    checkpoint = tmp_path / step
    held = read_witnessed(checkpoint)
    target = tmp_path / "fork"
    target.mkdir()
    inherit_logs(tmp_path / "scores", target, held)
    known = {(group, digest) for group, _, digest in held.scores}
    copied = read_score_logs(target)["scorer-0"]
    assert {(line.group, line.digest) for line in copied.stored} <= known
    copy = read_ledger(checkpoint / "buffer")
    said = noticed(replace(evidence, ledger=copy, scorers=read_score_logs(target)))
    assert [what for what in said if "scores/" in what or "told" in what or "announced" in what] == []


@dataclass(frozen=True)
class Lost:
    """A run whose buffer's host was lost: a group was scored before the checkpoint, one behind it, one on the branch
    that then began."""

    evidence: Evidence
    before: GroupLease
    behind: GroupLease
    later: GroupLease


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    run = Simulated(tmp_path, max_staleness=2, **SCORED)
    for ticket in run.issue(4):
        run.put(ticket)
    (before,) = run.score(1)
    run.checkpoint()
    (behind,) = run.score(1)
    lose_host(run)
    for ticket in run.issue(6):
        run.put(ticket)
    run.score(1, bring=False)
    later = next(each for each in run.score() if each.branch == 1)
    evidence = run.evidence()
    folder = SimpleNamespace(checkpoints=tmp_path)
    ledger = with_checkpoints(folder, evidence.ledger, run.lists)  # type: ignore[arg-type]
    assert ledger.scores_in_checkpoints
    return Lost(replace(evidence, ledger=ledger), before, behind, later)


def without(ledger: LedgerRows, group: int) -> LedgerRows:
    """The ledger as if the group had never been given to a scorer."""
    tables = {name: [row for row in rows if row.get("grp") != group] for name, rows in ledger.tables.items()}
    return replace(ledger, tables=ledger.tables | {name: tables[name] for name in ("scores", "scorings")})


def test_scores_behind_the_checkpoint_are_lost_with_the_host(lost: Lost) -> None:
    assert [str(each) for each in violations(lost.evidence)] == []
    stored = {row["grp"] for row in lost.evidence.ledger.tables["scores"]}
    assert lost.behind.group in {line.group for line in lost.evidence.scorers["scorer-0"].stored} - stored


@pytest.mark.parametrize("which", ["before", "later"])
def test_other_scores_are_not_excused_by_a_lost_host(lost: Lost, which: str) -> None:
    """A checkpoint that outlived the host has them, or they came on the branch that began behind it."""
    group = getattr(lost, which).group
    found = noticed(replace(lost.evidence, ledger=without(lost.evidence.ledger, group)))
    assert f"scorer-0 was told that the scores of group {group} are stored, the ledger lacks them" in found
