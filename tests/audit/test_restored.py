"""A ledger that was restored from a checkpoint lacks what came after the checkpoint, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.actors.ack_log import AckLog
from asyncrl.audit.actor_logs import read_logs
from asyncrl.audit.checks import violations
from asyncrl.audit.checks.announced import announced
from asyncrl.audit.checks.logs import acknowledgements
from asyncrl.audit.command import audit
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import figures
from asyncrl.audit.witnesses import Evidence, gather
from asyncrl.buffer.ledger.storage.snapshot import restore
from asyncrl.buffer.ledger.witnessed import Witnessed, read_witnessed
from asyncrl.errors import RunError
from asyncrl.launch.origins import Origin, covered, inherit_logs
from asyncrl.learner.checkpoints.checkpoints import complete
from asyncrl.run_folder import RunFolder
from tests.audit.simulated import Simulated
from tests.audit.test_audit import ask, sql
from tests.audit.test_disk_losses import resumed
from tests.buffer.fakes import put, trajectory


def evidence(run: RunFolder) -> Evidence:
    config = run.load_config()
    with closing(PayloadFiles(run.ledger(config) / "payloads")) as payloads:
        return gather(run, config, payloads)


def named(run: RunFolder) -> set[str]:
    """The checks that something violates."""
    config = run.load_config()
    with closing(PayloadFiles(run.ledger(config) / "payloads")) as payloads:
        return {violation.check for violation in violations(gather(run, config, payloads))}


@pytest.fixture
def restored(run: RunFolder) -> RunFolder:
    """The host of its buffer is gone, and the newest checkpoint but one is the newest that was completed."""
    newest = complete(run.checkpoints)[-1]
    shutil.rmtree(newest)
    events = (run.path / "events.jsonl").read_text().splitlines(keepends=True)
    (run.path / "events.jsonl").write_text("".join(line for line in events if newest.name not in line))
    shutil.rmtree(run.buffer)
    restore(run.checkpoints, run.buffer)
    return run


@pytest.mark.parametrize("begun", [False, True])
def test_what_the_restored_checkpoint_holds_cannot_have_been_lost(restored: RunFolder, begun: bool) -> None:
    if begun:
        resumed(restored)
    assert named(restored) == set()
    assert figures(evidence(restored)).lost["host"] > 0, "what came after the checkpoint"
    (checkpoint,) = complete(restored.checkpoints)
    branch, group, index, _ = min(read_witnessed(checkpoint).trajectories)
    assert branch == 0
    sql(restored, "DELETE FROM trajectories WHERE grp = ? AND idx = ?", group, index)
    sql(restored, "UPDATE groups SET state = 'dropped', reason = 'discarded_branch' WHERE number = ?", group)
    assert "acknowledgements" in named(restored)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM published WHERE version = 1", "history: the learner published version 1 of branch 0 as"),
        (
            "DELETE FROM batches WHERE b = 1",
            "learner: batch 1 in the learner's list (step-000002) is not in",
        ),
    ],
)
def test_versions_and_batches_before_the_checkpoint_cannot_have_been_lost(
    restored: RunFolder, statement: str, said: str
) -> None:
    resumed(restored)
    sql(restored, statement)
    config = restored.load_config()
    with closing(PayloadFiles(restored.ledger(config) / "payloads")) as payloads:
        found = [str(v) for v in violations(gather(restored, config, payloads))]
    assert any(v.startswith(said) for v in found)


def test_a_checkpoint_that_was_completed_too_late_was_lost_as_well(run: RunFolder, tmp_path: Path) -> None:
    """The buffer's host died between its part of the checkpoint and the checkpoint's final name."""
    newest = complete(run.checkpoints)[-1]
    late = newest.rename(tmp_path / newest.name)
    shutil.rmtree(run.buffer)
    restore(run.checkpoints, run.buffer)
    resumed(run)
    shutil.move(late, newest)
    assert named(run) == set()


def test_a_fork_has_lost_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    origin = Origin(fork=run.path, at_step=2)
    config = origin.load(None, {"launch.name": "forked", "launch.runs_dir": str(run.path.parent)}).config
    checkpoint = origin.check(config)
    assert checkpoint is not None
    forked = origin.open(config, "unused", checkpoint)
    restore(forked.checkpoints, forked.buffer)
    resumed(forked)
    assert named(forked) == set()
    found = figures(evidence(forked))
    assert found.lost == {"host": 0, "disk": 0}
    stored = len(read_witnessed(checkpoint).trajectories)
    assert found.witnesses["acknowledgements"] == stored == found.witnesses["trajectories"]
    assert found.unlogged == 0
    assert figures(evidence(run)).witnesses["acknowledgements"] > found.witnesses["acknowledgements"]
    assert audit(run) == 0, capsys.readouterr().out
    forked.remove_temporary()
    sql(forked, "DELETE FROM trajectories WHERE grp = 0 AND idx = 0")
    assert ask(forked, "SELECT count(*) FROM trajectories")[0][0] == stored - 1
    assert "acknowledgements" in named(forked)


def test_a_log_is_cut_behind_the_last_line_that_the_checkpoint_holds() -> None:
    acks = [{"branch": 0, "group": g, "index": 0, "digest": f"d{g}", "n": g} for g in range(4)]
    lines = [json.dumps(ack).encode() for ack in acks]
    held = Witnessed(trajectories={(0, 0, 0, "d0"), (0, 2, 0, "d2"), (0, 3, 0, "another")})
    assert covered(lines, held, "a") == lines[:3], "a line within is kept, whatever it says"
    assert covered([b"nonsense", *lines], held, "a") == [b"nonsense", *lines[:3]]
    assert covered(lines, Witnessed(), "a") == []
    assert covered(lines, Witnessed(lines={"a": 1, "b": 3}), "a") == lines[:2]
    odd = [b"[]", b"1", b'{"n": 0, "put": 1}', b'{"n": 0, "turn": {"group": []}}', b'{"n": "1"}', b"\xff"]
    assert covered(odd, held, "a") == []


def _told_how_far_the_log_is(run: Simulated) -> None:
    """The episode is announced, and not yet put, when the actor asks for tickets."""
    run.log.announce(trajectory(run.issue(1)[0], (1,)))
    run.buffer.logged("actor-0", run.log.head)


def _stored(run: Simulated) -> None:
    """The actor is killed before it writes that its put is acknowledged."""
    put(run.buffer, run.log.announce(trajectory(run.issue(1)[0], (1,))))


def _a_first_line(run: Simulated) -> None:
    """Another actor has announced its first episode, and asks for a second ticket."""
    with closing(AckLog(run.folder / "acks" / "actor-1.jsonl")) as log:
        log.announce(trajectory(run.issue(1)[0], (1,)))
        run.buffer.logged("actor-1", log.head)


def _evaluated(run: Simulated) -> None:
    run.evaluate()


def _handed_over(run: Simulated) -> None:
    run.hand_over(run.issue(1)[0])


@pytest.mark.parametrize("last", [_told_how_far_the_log_is, _stored, _a_first_line, _evaluated, _handed_over])
def test_the_logs_of_a_fork_have_what_its_ledger_was_told(tmp_path: Path, last: Callable[[Simulated], None]) -> None:
    source = Simulated(tmp_path / "source", eval_tasks=2, durable=True)
    source.rounds(1)
    last(source)
    source.checkpoint()
    before = {log.name: log.read_bytes() for log in (source.folder / "acks").iterdir()}
    source.rounds(1)
    source.hand_over(source.issue(1)[0])
    source.evaluate()
    checkpoint = source.folder / "step-000001"
    (tmp_path / "acks").mkdir()
    inherit_logs(source.folder / "acks", tmp_path / "acks", read_witnessed(checkpoint))
    ledger, logs = read_ledger(checkpoint / "buffer"), [*read_logs(tmp_path / "acks").values()]
    assert [*announced(ledger, logs), *(text for log in logs for text in acknowledgements(ledger, log))] == []
    assert {log.name: log.read_bytes() for log in (tmp_path / "acks").iterdir()} == before, "and nothing of later"
    source.buffer.database.close()


def test_a_checkpoint_whose_ledger_cannot_be_read_is_named(run: RunFolder) -> None:
    checkpoint = complete(run.checkpoints)[0]
    (checkpoint / "buffer" / "ledger.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(RunError, match=r"step-000002/buffer/ledger\.sqlite cannot be read"):
        read_witnessed(checkpoint)
