"""Scores of a teacher on servers in the audit: what each witness would miss, and what a fork takes along."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.scorer_logs import read_score_log, read_score_logs
from asyncrl.audit.witnesses import Evidence
from asyncrl.buffer.ledger.storage.payloads import checksum
from asyncrl.buffer.ledger.witnessed import read_witnessed
from asyncrl.launch.origins import inherit_logs
from tests.audit.simulated import taught


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
