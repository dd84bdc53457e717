"""The buffer process is killed at random moments while actors and a learner are at work: the audit holds every time."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.reading import read_ledger
from tests.audit.killed_run import train
from tests.audit.real_run import fake_actor
from tests.buffer.processes import BufferProcess


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(4, marks=pytest.mark.system),
        pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_the_audit_holds_after_every_kill(tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(kills)
    added = Path(__file__).with_name("added_rows.py")
    process = BufferProcess(tmp_path / "run", data={"on_step_end": f"{added}:more"})
    process.start()
    over = threading.Event()
    client, incarnation = process.learner()
    learner = threading.Thread(target=train, args=(client, incarnation, over))
    try:
        with fake_actor(process.run, "actor-0"), fake_actor(process.run, "actor-1"):
            learner.start()
            for _ in range(kills):
                time.sleep(rng.uniform(0.1, 0.5))
                process.kill()
                assert audit(process.run) == 0, capsys.readouterr().out
                process.start()
                process.client().status()
                assert audit(process.run) == 0, capsys.readouterr().out
            over.set()
            learner.join(30)
    finally:
        over.set()
        process.close()
    assert not learner.is_alive()
    assert audit(process.run) == 0
    assert "trained 0" not in capsys.readouterr().out.split("branch 0")[-1]
    rows = read_ledger(process.run.ledger(process.run.load_config())).added.values()
    drawn = [row.draw for row in rows if row.draw is not None]
    assert len(drawn) == len(set(drawn)) > 0, "rows of on_step_end, each drawn once"
    assert drawn == sorted(drawn)
