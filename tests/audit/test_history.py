"""Every history that the buffer can have passes the audit: forks, poison, restores, whatever hypothesis finds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from asyncrl.audit.actor_logs import Ack, AckLines
from asyncrl.audit.checks.accounting import equation, staleness, uses
from asyncrl.audit.checks.chain import chain
from asyncrl.audit.checks.drops import drops
from asyncrl.audit.checks.history import batches_hold_what_was_there, history
from asyncrl.audit.checks.logs import acknowledgements, loss
from asyncrl.audit.checks.references import rows
from asyncrl.audit.checks.replays import replays
from asyncrl.audit.checks.tasks.curriculum import curriculum
from asyncrl.audit.checks.tasks.draws import draws, prompts_drawn_again_were_dropped
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadFiles, payloads
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import account
from asyncrl.audit.witnesses import Bounds
from asyncrl.buffer.ledger.storage.snapshot import restore
from tests.audit.histories.batches import awaited
from tests.buffer.fakes import RULES, FakeCurriculum, FakeSource, learner, open_buffer, play, put, step, trajectory
from tests.buffer.test_interleavings import Interleavings
from tests.buffer.tickets.test_lengths import cut


def found(folder: Path, source: FakeSource, acks: list[Ack], bounds: Bounds) -> Iterator[str]:
    ledger = read_ledger(folder)
    yield from rows(ledger)
    yield from draws(ledger, lambda draw: (str(source.task(draw)["id"]), RULES["group_size"]))
    yield from curriculum(ledger, FakeCurriculum())
    yield from equation(ledger)
    yield from uses(ledger, bounds)
    yield from staleness(ledger, bounds)
    yield from drops(ledger, (bounds,))
    yield from replays(ledger, (bounds,))
    yield from history(ledger, [], [])
    yield from chain(ledger, [])
    yield from acknowledgements(ledger, AckLines("actor-0", acks, [], []))
    files = PayloadFiles(folder / "payloads")
    yield from payloads(ledger, files.read)
    files.close()


class AuditedInterleavings(Interleavings):
    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        o: dict[str, Any] = self.options
        bounds = Bounds(
            2,
            o["max_uses"],
            o["max_staleness"],
            o["over_age"],
            o["mask_min_kept"],
            filters=o["filters"],
            filter_max_ratio=o["filter_max_ratio"],
            env_retries=o["env_retries"],
            replay=o.get("replay"),
        )
        acks = [Ack(t.id.branch, *key, t.attempt, t.digest()) for key, t in self.stored.items()]
        problems = list(found(self.folder, self.source, acks, bounds))
        ledger = read_ledger(self.folder)
        for branch in ledger.branches:
            expected = self.buffer.ledger.account.equation(branch)
            assert +Counter(account(ledger, branch)) == +Counter(expected)
        super().teardown()
        assert problems == []


def test_any_interleaving_passes() -> None:
    few = settings(max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AuditedInterleavings, settings=few)


BOUNDS = Bounds(groups_per_step=2, max_uses=1, max_staleness=1, over_age="drop", mask_min_kept=0.5)


def test_what_went_down_with_a_host_is_counted_and_no_violation(tmp_path: Path) -> None:
    checkpoints, ledger = tmp_path / "checkpoints", tmp_path / "ledger"
    checkpoints.mkdir()
    buffer = open_buffer(ledger, curriculum=FakeCurriculum())
    incarnation = learner(buffer)
    tickets = play(buffer)
    step(buffer, incarnation, 0)
    unfinished = buffer.issue(0, "actor-0", (0, 1), 2)[0]
    put(buffer, trajectory(unfinished[0], (1,)))
    path = checkpoints / "step-000001"
    path.mkdir()
    buffer.checkpointed(0, incarnation, 1, 1, path)
    (path / "state.json").write_text('{"branch": 0, "batch": 1}')
    after = trajectory(unfinished[1], (1,))
    put(buffer, after)
    later = play(buffer)
    assert later
    buffer.commit(0)
    buffer.database.close()
    shutil.rmtree(ledger)  # the host is gone

    kept = [trajectory(t, (0,), float(t.id.index % 2)) for t in tickets]
    gone = [after, *(trajectory(t, (1,), float(t.id.index % 2)) for t in later)]
    acks = [Ack(0, t.id.group, t.id.index, t.attempt, t.digest()) for t in [*kept, *gone]]
    lost = [None] * len(kept) + ["host"] * len(gone)
    assert restore(checkpoints, ledger) == path
    for begun in (False, True):  # the run may be stopped before a learner begins the new branch
        buffer = open_buffer(ledger, curriculum=FakeCurriculum())
        if begun:
            learner(buffer, version=1, batch=1, branch=0)
        play(buffer)
        buffer.commit(0)
        buffer.database.close()
        assert list(found(ledger, FakeSource(), acks, BOUNDS)) == []
        account_of: LedgerRows = read_ledger(ledger)
        assert account_of.restored == (not begun)
        assert [loss(account_of, ack) for ack in acks] == lost
    forged = Ack(0, tickets[0].id.group, 0, 0, "another digest")
    assert loss(account_of, forged) is None
    assert "the ledger has digest" in next(acknowledgements(account_of, AckLines("actor-0", [forged], [], [])))


def test_what_the_disk_lost_is_counted_and_no_violation(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, curriculum=FakeCurriculum())
    learner(buffer)
    tickets = play(buffer, credits=2)
    buffer.commit(0)
    buffer.database.close()
    (segment,) = (tmp_path / "payloads").glob("*.segment")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 10)
    buffer = open_buffer(tmp_path, curriculum=FakeCurriculum())
    assert buffer.lost_to_disk == 1
    learner(buffer)
    buffer.commit(0)
    buffer.database.close()
    acks = [Ack(0, t.id.group, t.id.index, 0, trajectory(t, (0,), float(t.id.index % 2)).digest()) for t in tickets]
    assert list(found(tmp_path, FakeSource(), acks, BOUNDS)) == []
    assert [loss(read_ledger(tmp_path), ack) for ack in acks] == [None, "disk"]


def test_a_group_of_which_the_disk_lost_something_is_whole_in_a_batch_that_was_not_left(tmp_path: Path) -> None:
    """What was lost came again; a batch that took it is held to that, one that a branch released is not."""
    buffer = open_buffer(tmp_path, curriculum=FakeCurriculum())
    learner(buffer)
    play(buffer, credits=4)
    buffer.commit(0)
    buffer.database.close()
    cut(tmp_path)
    buffer = open_buffer(tmp_path, curriculum=FakeCurriculum())
    incarnation = learner(buffer)
    play(buffer)
    step(buffer, incarnation, 0)
    buffer.commit(0)
    buffer.database.close()
    ledger = read_ledger(tmp_path)
    assert [a.ended for a in ledger.attempts[1, 1]] == ["lost", "stored"]
    assert list(batches_hold_what_was_there(ledger, ([], [], []))) == []
    later = ledger.trajectories | {(1, 1): replace(ledger.trajectories[1, 1], branch=1)}
    less = {key: row for key, row in ledger.trajectories.items() if key != (1, 1)}
    for changed in (replace(ledger, trajectories=later), replace(ledger, trajectories=less)):
        (said,) = batches_hold_what_was_there(changed, ([], [], []))
        assert said == "batch 0 of branch 0 holds group 1, which was not complete on its branch"
        left = replace(changed, batches=[replace(batch, released=True) for batch in changed.batches])
        assert list(batches_hold_what_was_there(left, ([], [], []))) == []


MANY_SEGMENTS = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.errors import RunError
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
PayloadFiles(Path(sys.argv[1])).close()
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
try:
    PayloadFiles(Path(sys.argv[1]))
except RunError as error:
    print(error)
"""


def test_more_segments_than_files_may_be_open(tmp_path: Path) -> None:
    """A run of 100 GB has more of them than the 1024 that most shells allow. In a process of its own: this one may have
    more than 300 open from earlier tests."""
    for segment in range(400):
        (tmp_path / f"{segment:08d}.segment").touch()
    command = [sys.executable, "-c", MANY_SEGMENTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ulimit -n 656" in done.stdout


def test_a_group_that_takes_its_own_place_is_noticed(tmp_path: Path) -> None:
    ledger = awaited(tmp_path).evidence().ledger
    again = next(group for group in ledger.groups.values() if group.replaces is not None)
    old = ledger.groups[again.replaces or 0]
    moved = {old.number: replace(old, replaces=old.number), again.number: replace(again, replaces=None)}
    said = [*prompts_drawn_again_were_dropped(replace(ledger, groups=ledger.groups | moved), lambda task: ("", 0))]
    assert said == [
        f"group {old.number} (draw {old.draw}) was drawn again for group {old.number}, which is no earlier one"
    ]
