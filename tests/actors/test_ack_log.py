from __future__ import annotations

import asyncio
import json
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from asyncrl.actors.ack_log import AckLog
from asyncrl.audit.actor_logs import read_acks
from asyncrl.buffer.record import from_record, to_record
from asyncrl.trajectory import LogHead
from tests.buffer.tickets.test_turns import sample
from tests.learner.tiny import random_trajectory

MADE = random_trajectory(0, 0, np.random.default_rng(0), rows=2, versions=(3, 5))


def test_a_line_that_a_power_cut_left_half_is_cut_off_and_numbers_go_on(tmp_path: Path) -> None:
    path = tmp_path / "acks" / "actor-0.jsonl"
    for _ in range(2):
        log = AckLog(path)
        log.write(MADE)
        log.close()
        with path.open("a") as file:
            file.write('{"n": 7, "bra')
    AckLog(path).close()
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_line_for_which_the_disk_has_no_room_leaves_no_part_of_it(tmp_path: Path) -> None:
    """Before, the next line was appended to that part, and the audit found both missing: half an hour of chaos."""
    path = tmp_path / "actor-0.jsonl"
    log = AckLog(path)
    log.write(MADE)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limit[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.announce(MADE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    made = log.announce(MADE)
    log.write(made)
    log.close()
    read = read_acks(path)
    assert (len(read.acks), len(read.puts), read.missing, read.unreadable) == (2, 1, [], [])
    assert made.logged == LogHead(1, read.heads[1])


def test_the_audit_reads_what_was_announced_and_the_same_heads(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.jsonl"
    log = AckLog(path)
    first = log.announce(MADE)
    log.write(first)
    log.close()
    log = AckLog(path)  # the actor starts again
    log.recorded((MADE.id, 1), sample(0))
    second = log.announce(MADE)
    assert log.head == second.logged
    log.close()
    found = read_acks(path)
    assert (found.missing, found.unreadable, len(found.acks), len(found.turns)) == ([], [], 1, 1)
    for made in (first, second):
        assert made.logged is not None
        assert found.heads[made.logged.line] == made.logged.digest
        line = found.puts[made.logged.line]
        assert (line.digest, line.reward, line.tokens) == (MADE.digest(), MADE.reward, MADE.num_tokens)
        assert sum(count for _, count in line.versions) == MADE.num_policy_tokens
        assert (line.versions[0][0], line.versions[-1][0]) == (MADE.oldest_version, MADE.newest_version)
        assert from_record(to_record(made)).logged == made.logged
        assert made.digest() == MADE.digest()


def test_a_line_is_on_the_disk_before_its_trajectory_is_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bytes] = []
    path = tmp_path / "actor-0.jsonl"
    monkeypatch.setattr("os.fdatasync", lambda _: flushed.append(path.read_bytes()))
    log = AckLog(path, flush=True)
    made = asyncio.run(log.announced(MADE))
    assert flushed == [path.read_bytes()]
    log.write(made)
    assert log.head == made.logged, "the acknowledgement is not on the disk yet, so it may get lost"
    asyncio.run(log.flush())
    asyncio.run(log.flush())
    assert log.head is not None
    assert (log.head.line, len(flushed)) == (1, 2)
    log.close()


def test_who_waits_for_the_disk_shares_its_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write of the disk for all who came before it, and one for all who came during it."""
    path = tmp_path / "actor-0.jsonl"
    flushed: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        flushed.append(path.read_bytes().count(b"\n"))
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr("os.fdatasync", slow)

    async def puts() -> None:
        first = [asyncio.create_task(log.announced(MADE)) for _ in range(5)]
        await asyncio.to_thread(begun.wait, 10)
        late = [asyncio.create_task(log.announced(MADE)) for _ in range(20)]
        await asyncio.sleep(0)
        late[3].cancel()
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*first, *late) if task is not late[3])
        go_on.set()
        made = await asyncio.gather(*first, *late, return_exceptions=True)
        assert isinstance(made.pop(8), asyncio.CancelledError)
        assert sorted(t.logged.line for t in made) == [n for n in range(25) if n != 8]

    log = AckLog(path, flush=True)
    asyncio.run(puts())
    assert flushed == [5, 25]
    log.close()


def test_a_disk_that_fails_is_told_to_all_who_wait_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OSError(5, "Input/output error"), None])

    def failing(_: int) -> None:
        if error := next(answers):
            raise error

    monkeypatch.setattr("os.fdatasync", failing)
    log = AckLog(tmp_path / "actor-0.jsonl", flush=True)

    async def puts() -> None:
        found = await asyncio.gather(*(log.announced(MADE) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in found] == [OSError] * 3
        assert log.head is None
        await log.flush()
        assert log.head is not None
        assert log.head.line == 2

    asyncio.run(puts())
    log.close()


def test_a_log_without_lines_has_no_head(tmp_path: Path) -> None:
    log = AckLog(tmp_path / "actor-0.jsonl")
    assert log.head is None
    log.write(MADE)
    assert isinstance(log.head, LogHead)
    log.close()
