"""The audit can fail: whatever a witness is robbed of, or made to say, is named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.audit.checks import listed
from asyncrl.audit.command import audit
from asyncrl.buffer.ledger.storage.payloads import SEGMENT_BYTES, checksum
from asyncrl.buffer.record import from_record, to_record
from asyncrl.cli import main
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.checkpoints.checkpoints import complete
from asyncrl.run_folder import RunFolder
from tests.audit.real_run import STEPS


def sql(run: RunFolder, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(run.buffer / "ledger.sqlite")) as db, db:
        assert db.execute(statement, values).rowcount > 0, "nothing was tampered with"


def ask(run: RunFolder, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{run.buffer}/ledger.sqlite?mode=ro", uri=True)) as db:
        return db.execute(query, values).fetchall()


def acks(run: RunFolder, change: Callable[[list[str]], list[str]]) -> None:
    path = run.acks / "actor-0.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def changed(line: str, **fields: int) -> str:
    return json.dumps(json.loads(line) | fields) + "\n"


def overwrite(run: RunFolder, group: int, index: int, offset: int, data: bytes) -> None:
    [(segment, start)] = ask(run, "SELECT segment, start FROM trajectories WHERE grp = ? AND idx = ?", group, index)
    with (run.buffer / "payloads" / f"{segment:08d}.segment").open("r+b") as file:
        file.seek(start + offset)
        file.write(data)


def learner_says(run: RunFolder, change: Callable[[list[Any]], None]) -> None:
    """Changes the newest list, and its checkpoint's digests with it: a learner that recorded something else."""
    path = complete(run.checkpoints)[-1]
    lines = [json.loads(line) for line in (path / "batches.jsonl").read_text().splitlines()]
    change(lines)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (path / "batches.jsonl").write_text(text)
    said = json.loads((path / "state.json").read_text())
    del said["digest"]
    said["files"]["batches.jsonl"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    digest = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()
    (path / "state.json").write_text(json.dumps(said | {"digest": digest}))


def test_an_untouched_run_passes(original: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = {
        path: path.read_bytes()
        for path in original.path.rglob("*")
        if not path.is_dir() and path.suffix != ".sqlite-shm"
    }
    assert audit(original, format="json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is True
    [(issued,)] = ask(original, "SELECT count(*) FROM groups")
    counts = said["equation"]["0"]
    assert counts["issued"] == issued == sum(n for name, n in counts.items() if name != "issued")
    assert counts["trained"] == 2 * STEPS
    assert (
        said["witnesses"]["acknowledgements"] == said["witnesses"]["trajectories"] == said["witnesses"]["payloads_kept"]
    )
    assert said["witnesses"]["listed_batches"] == STEPS
    assert said["puts"]["duplicate"] == said["witnesses"]["trajectories"] // 7
    assert sum(said["staleness"].values()) == 2 * STEPS
    assert said["bias"]["trained"]["count"] == 4 * STEPS
    assert audit(original) == 0
    text = capsys.readouterr().out
    assert f"issued {issued} = in flight" in text
    assert text.endswith("audit: every witness agrees\n")
    assert {path: path.read_bytes() for path in before} == before, "the audit changes nothing"


def test_statistics_that_sqlite_keeps_are_nobodys_table(run: RunFolder) -> None:
    with closing(sqlite3.connect(run.buffer / "ledger.sqlite")) as db, db:
        db.execute("ANALYZE")
    assert audit(run) == 0


def test_a_table_that_asyncrl_does_not_make_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect(run.buffer / "ledger.sqlite")) as db, db:
        db.execute("CREATE TABLE notes(text)")
    assert audit(run) == 1
    assert "the ledger has a table notes, which no version of asyncrl makes" in capsys.readouterr().out


TAMPERINGS: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    "a group": (
        lambda run: sql(run, "DELETE FROM groups WHERE number = 3"),
        "rows: group 3 is missing from the ledger",
    ),
    "the last group": (
        lambda run: sql(run, "DELETE FROM groups WHERE number = (SELECT max(number) FROM groups)"),
        "rows: attempts at trajectory ?.",
    ),
    "a trajectory": (
        lambda run: sql(run, "DELETE FROM trajectories WHERE grp = 2 AND idx = 1"),
        "rows: trajectory 0.2.1 is missing from the ledger",
    ),
    "an attempt": (
        lambda run: sql(run, "DELETE FROM attempts WHERE grp = 2 AND idx = 1"),
        "rows: trajectory 0.2.1 was stored from attempt 0, which is not in the ledger",
    ),
    "a use": (lambda run: sql(run, "DELETE FROM uses WHERE grp = 1"), "equation: group 1 counts 1 uses"),
    "a batch": (lambda run: sql(run, "DELETE FROM batches WHERE b = 1"), "equation: group 2 counts 1 uses"),
    "a use twice": (
        lambda run: sql(run, "INSERT INTO uses VALUES ((SELECT serial FROM batches WHERE b = 3), 2, 0)"),
        "equation: group 0 counts 1 uses, applied batches hold it 2 times",
    ),
    "a use twice, counted": (
        lambda run: (
            sql(run, "INSERT INTO uses VALUES ((SELECT serial FROM batches WHERE b = 3), 2, 0)"),
            sql(run, "UPDATE groups SET uses = 2 WHERE number = 0"),
        )[0],
        "uses: group 0 is used again in batch 3; buffer.max_uses is 1",
    ),
    "a state": (
        lambda run: sql(run, "UPDATE groups SET state = 'dropped', reason = 'stale' WHERE number = 0"),
        "equation: group 0 is dropped: stale, and an applied batch holds it",
    ),
    "a reason": (
        lambda run: sql(run, "UPDATE groups SET reason = 'whim' WHERE number = 0"),
        "equation: group 0 is trained: whim, which is no state with a named reason",
    ),
    "a reason of what was not dropped": (
        lambda run: sql(run, "UPDATE groups SET reason = 'stale' WHERE number = 0"),
        "equation: group 0 is trained: stale, which is no state with a named reason",
    ),
    "an outcome": (
        lambda run: sql(run, "UPDATE batches SET outcome = NULL WHERE b = 1"),
        "uses: batch 1 is open, and a later one was fixed",
    ),
    "a place in a batch": (
        lambda run: sql(run, "DELETE FROM uses WHERE place = 1 AND serial = (SELECT max(serial) FROM batches)"),
        "uses: batch 3 holds 1 groups, a full one has 2",
    ),
    "a prompt": (
        lambda run: sql(run, "UPDATE groups SET state = 'dropped', reason = 'discarded_branch' WHERE number = 0"),
        "draws: the prompt of group 0 (dropped: discarded_branch) was not put back",
    ),
    "a prompt drawn twice": (
        lambda run: (
            sql(run, "UPDATE groups SET state = 'dropped', reason = 'stale', put_back = 1 WHERE number = 0"),
            sql(run, "UPDATE groups SET replaces = 0, draw = 0 WHERE number = 3"),
        )[0],
        "draws: the prompt of group 0 was put back once and is to be drawn, or was drawn, twice",
    ),
    "a state of the curriculum": (
        lambda run: sql(run, "UPDATE curriculum SET state = '7' WHERE batch = 2"),
        "curriculum: the state at batch 2 is 7; the rewards make it null",
    ),
    "a task": (
        lambda run: sql(run, "UPDATE groups SET task = 1 WHERE number = 2"),
        "draws: group 2 (draw 2) is of task 'lookup-0-train-2'; the seed says 'lookup-0-train-1'",
    ),
    "a draw": (
        lambda run: sql(run, "UPDATE groups SET draw = 1 WHERE number = 2"),
        "draws: draw 1 was made twice: groups 1 and 2",
    ),
    "the cursor": (
        lambda run: sql(run, "UPDATE kv SET value = '99' WHERE key = 'next_draw'"),
        "draws: draw ",
    ),
    "a version": (
        lambda run: sql(run, "UPDATE batches SET version = 7 WHERE b = 3"),
        "uses: batch 3 was fixed at version 7; the outcomes before it make 3",
    ),
    "old tokens": (
        lambda run: sql(
            run,
            "UPDATE trajectories SET versions = ?, policy_tokens = 5 WHERE idx = 0 AND grp = "
            "(SELECT max(grp) FROM uses)",
            struct.pack("<2q", 0, 5),
        ),
        "rows: trajectory 0.",
    ),
    "old tokens, of old tickets": (
        lambda run: (
            sql(run, "UPDATE attempts SET min_version = 0"),
            sql(run, "UPDATE trajectories SET versions = ?, policy_tokens = 5", struct.pack("<2q", 0, 5)),
        )[0],
        "versions old in batch 2; its bound on staleness is 1",
    ),
    "a version of the future": (
        lambda run: sql(
            run,
            "UPDATE trajectories SET versions = ?, policy_tokens = 5 WHERE grp = 0 AND idx = 0",
            struct.pack("<2q", 3, 5),
        ),
        "staleness: trajectory 0.0.0 has version 3, ahead of batch 0's 0",
    ),
    "a digest": (
        lambda run: sql(run, "UPDATE trajectories SET digest = 'x' WHERE grp = 1 AND idx = 0"),
        "acknowledgements: actor-0 was told that 0.1.0 is stored, and the ledger has digest x",
    ),
    "an acknowledgement": (
        lambda run: acks(run, lambda lines: lines[:3] + lines[4:]),
        "acknowledgements: acks/actor-0.jsonl lacks acknowledgement 3",
    ),
    "a garbled acknowledgement": (
        lambda run: acks(run, lambda lines: [*lines[:3], "?\n", *lines[4:]]),
        "acknowledgements: acks/actor-0.jsonl line 4 is no acknowledgement",
    ),
    "one acknowledgement too many": (
        lambda run: acks(run, lambda lines: [*lines, changed(lines[1], n=len(lines), group=999)]),
        "is stored, and the ledger has no group 999",
    ),
    "a segment": (
        lambda run: (run.buffer / "payloads" / "00000000.segment").unlink(),
        "payloads: the payload of trajectory 0.0.0 is missing: there is no segment 0",
    ),
    "the end of a segment": (
        lambda run: (run.buffer / "payloads" / "00000000.segment").open("r+b").truncate(100) and None,
        "payloads: the payload of trajectory 0.0.0 is missing: segment 0 ends before byte",
    ),
    "a payload": (
        lambda run: overwrite(run, 1, 0, 200, b"\xff\xff\xff"),
        "payloads: the payload of trajectory 0.1.0 was changed",
    ),
    "a reward": (
        lambda run: sql(run, "UPDATE trajectories SET reward = 0.5 WHERE grp = 1 AND idx = 0"),
        "payloads: the payload of trajectory 0.1.0 has reward",
    ),
    "a reclaimed payload": (
        lambda run: sql(run, "UPDATE groups SET payload = 0, state = 'waiting' WHERE number = 0"),
        "payloads: group 0 is waiting, and its payload was reclaimed",
    ),
    "the learner's digest": (
        lambda run: learner_says(run, lambda lines: lines[1][2].update({"2": "00"})),
        "learner: group 2 of batch 1 in the learner's list (step-000004) is of another digest",
    ),
    "the learner's groups": (
        lambda run: learner_says(run, lambda lines: lines[0][2].pop("1") and None),
        "learner: batch 0 in the learner's list (step-000004) holds groups [0], the ledger says [0, 1]",
    ),
    "the learner's outcome": (
        lambda run: learner_says(run, lambda lines: lines[2].__setitem__(1, "guard")),
        "learner: batch 2 in the learner's list (step-000004) is guard, the ledger says applied",
    ),
    "a batch of the learner's": (
        lambda run: learner_says(run, lambda lines: lines.pop(2) and None),
        "learner: the list in step-000004 does not name the batches 0 to 3, each once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERINGS)
def test_what_is_tampered_with_is_named(run: RunFolder, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    tamper, expected = TAMPERINGS[what]
    tamper(run)
    assert audit(run) == 1
    text = capsys.readouterr().out
    assert "audit: VIOLATION of " in text
    assert expected in text


def test_a_payload_that_is_consistent_in_itself_is_still_another_than_was_recorded(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes and checksum changed together: the digest gives it away."""
    [(segment, start, size)] = ask(run, "SELECT segment, start, bytes FROM trajectories WHERE grp = 1 AND idx = 0")
    path = run.buffer / "payloads" / f"{segment:08d}.segment"
    assert path.stat().st_size < SEGMENT_BYTES
    record = bytearray(path.read_bytes()[start : start + size])
    (frames,) = struct.unpack_from("<Q", record)
    header = struct.unpack_from("<Q", record, 8)[0]
    token = 8 * (frames + 1) + header + -header % 8
    record[token] ^= 1
    overwrite(run, 1, 0, 0, bytes(record))
    sql(run, "UPDATE trajectories SET checksum = ? WHERE grp = 1 AND idx = 0", checksum(record))
    assert audit(run) == 1
    assert "payloads: the payload of trajectory 0.1.0 has digest" in capsys.readouterr().out


def test_a_turn_that_is_rewarded_otherwise_than_was_recorded_is_noticed(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state of a turn, which nothing else of the record depends on, in a payload whose checksum fits."""
    [(segment, start, size)] = ask(run, "SELECT segment, start, bytes FROM trajectories WHERE grp = 1 AND idx = 0")
    record = (run.buffer / "payloads" / f"{segment:08d}.segment").read_bytes()[start : start + size]
    t = from_record(record)
    assert t.turn_rewards[-1].state == b"b"
    changed = bytes(
        to_record(dataclasses.replace(t, turn_rewards=(*t.turn_rewards[:-1], replace(t.turn_rewards[-1], state=b"c"))))
    )
    assert len(changed) == size
    overwrite(run, 1, 0, 0, changed)
    sql(run, "UPDATE trajectories SET checksum = ? WHERE grp = 1 AND idx = 0", checksum(changed))
    assert audit(run) == 1
    assert "payloads: the payload of trajectory 0.1.0 has digest" in capsys.readouterr().out


def test_a_clock_that_was_set_back_is_no_violation(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """But for the chain of commits, which notices that this test has edited the rows."""
    sql(run, "UPDATE attempts SET ended_at = issued_at - 3600")
    sql(run, "UPDATE batches SET finished_at = fixed_at - 3600")
    sql(run, "UPDATE trajectories SET received_at = -1e9")
    audit(run, format="json")
    assert {violation["check"] for violation in json.loads(capsys.readouterr().out)["violations"]} == {"chain"}
    assert audit(run, step=3) == 0


def test_a_killed_writer_leaves_a_log_that_is_read_and_left_alone(run: RunFolder) -> None:
    with closing(sqlite3.connect(run.buffer / "ledger.sqlite")) as writer:
        writer.execute("INSERT OR REPLACE INTO kv VALUES ('next_draw', '99')")
        writer.commit()
        assert (run.buffer / "ledger.sqlite-wal").stat().st_size > 0
        assert audit(run) == 1, "what is only in the log was seen"
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM groups")
        assert audit(run) == 1
        writer.rollback()


def test_a_step_names_its_trajectories(original: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(original, step=3, format="json") == 0
    rows = json.loads(capsys.readouterr().out)
    groups = [
        g for (g,) in ask(original, "SELECT grp FROM uses JOIN batches USING (serial) WHERE b = 2 ORDER BY place")
    ]
    assert [(row["group"], row["index"]) for row in rows] == [(g, i) for g in groups for i in range(2)]
    assert {row["version"] for row in rows} == {2}
    assert all(0 <= row["staleness"] == 2 - min(row["versions"]) <= 1 for row in rows)
    assert all(0 < row["importance_weight"] <= 2 for row in rows), "tis caps them at 2"
    assert {row["actor"] for row in rows} == {"actor-0"}
    assert audit(original, step=3) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 3: batch 2, trained on version 2, 4 trajectories\n")
    assert f"{rows[0]['importance_weight']:.4f}" in text
    assert "\nfixed 20" in text
    assert all(row["issued_at"] <= row["received_at"] <= row["fixed_at"] <= row["finished_at"] for row in rows)
    assert f"{rows[0]['fixed_at'] - rows[0]['received_at']:.2f}" in text
    with pytest.raises(ConfigError, match=r"--step is 9; the run has applied the training steps 1 to 4"):
        audit(original, step=9)


def test_parquet(original: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.parquet"
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[parquet\]'"):
        audit(original, format="parquet", out=out)
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
    assert audit(original, format="parquet", out=out) == 0
    table = parquet.read_table(out)
    assert table.num_rows == ask(original, "SELECT count(*) FROM trajectories")[0][0]
    assert table.column("reason").null_count == table.num_rows
    assert set(table.column("staleness").to_pylist()) <= {0, 1, None}
    assert table.column("received_at").to_pylist() == [
        at for (at,) in ask(original, "SELECT received_at FROM trajectories ORDER BY grp, idx")
    ]


def test_no_ledger_is_one_sentence(run: RunFolder) -> None:
    (run.buffer / "ledger.sqlite-wal").unlink()
    (run.buffer / "ledger.sqlite").write_bytes(b"not a database, though long enough to be taken for one" * 20)
    with pytest.raises(RunError, match="cannot be read"):
        audit(run)
    (run.buffer / "ledger.sqlite").unlink()
    with pytest.raises(RunError, match="holds no ledger"):
        audit(run)


def test_the_command(original: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(original.path), "--step", "2"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("step 2: batch 1")


def test_every_check_says_what_must_hold() -> None:
    sentences = [sentence for checks in listed().values() for sentence in checks]
    assert len(sentences) > len(listed()) > 9
    assert [sentence for sentence in sentences if not sentence.endswith(".")] == []
