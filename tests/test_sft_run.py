"""Supervised fine-tuning with the real processes: a buffer and a learner. A learner that is killed redoes the same
demonstrations, bit for bit; the audit proves their order, and is red when it is changed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import replay
from asyncrl.data.order import EpochOrder
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.audit.mutations import mend
from tests.data.demonstrations.chats import turns, written

pytestmark = [pytest.mark.system, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[1]
STEPS = 8
PER_STEP, CHATS = 6, 40
DIES_AT = EpochOrder("demonstrations", 0, CHATS).position(6 * PER_STEP + 2)
"""The chat at which a learner kills itself, once: in batch 6, before which the checkpoint at batch 3 is complete."""
# Only the learner has this role, and only the first one to see the chat: the launcher renders chats as well.
DEADLY = f'''
import os, signal
from pathlib import Path
from asyncrl.rendering.template import TemplateRenderer

class Deadly(TemplateRenderer):
    def render_answer(self, before, message, tools):
        once = Path({{once!r}})
        if message["content"] == "{DIES_AT}" and os.environ.get("ASYNCRL_ROLE") == "learner" and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().render_answer(before, message, tools)
'''


def launched(folder: Path, name: str) -> RunFolder:
    """A run of `STEPS` steps in `folder`, with its renderer."""
    values = {
        "data.demonstrations": folder / "chats.jsonl",
        "actors.renderer": f"{folder / 'deadly.py'}:Deadly",
        "learner.steps": STEPS,
        "learner.demonstrations.per_step": PER_STEP,
        "learner.checkpoint_every": 3,
        "weights.every": 1,
        "launch.runs_dir": folder / "runs",
        "launch.name": name,
    }
    words = [word for field, value in values.items() for word in (f"--{field}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "launch", "--config", str(ROOT / "configs" / "sft.yaml"), *words],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder.existing(folder / "runs" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    written(folder / "chats.jsonl", map(turns, range(CHATS)))
    (folder / "deadly.py").write_text(DEADLY.format(once=str(folder / "once")))
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunFolder:
    return launched(folder, "undisturbed")


@pytest.fixture(scope="module")
def killed(folder: Path, undisturbed: RunFolder) -> RunFolder:
    (folder / "once").touch()
    run = launched(folder, "killed")
    assert not (folder / "once").exists(), "no learner was killed"
    return run


def test_a_killed_learner_gives_the_same_weights_bit_for_bit(undisturbed: RunFolder, killed: RunFolder) -> None:
    summary = json.loads(killed.summary.read_text())
    assert (summary["outcome"], summary["steps"], summary["restarts"]) == ("finished", STEPS, {"learner": 1})
    one, other = (read_ledger(run.buffer) for run in (undisturbed, killed))
    assert one.published == other.published
    assert sorted(version for _, version in one.published) == list(range(STEPS + 1))
    assert len(other.tables["incarnations"]) == 2
    assert other.tables["incarnations"][1]["start_batch"] in (3, 6)
    assert list(one.demonstrations.values()) == list(other.demonstrations.values())


def test_what_it_trained_on_is_accounted_for(
    killed: RunFolder, undisturbed: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(killed) == audit(undisturbed) == 0
    out = capsys.readouterr().out
    assert "issued 0 = in flight 0 + waiting 0 + assigned 0 + trained 0 + dropped 0" in out
    assert "demonstrations    48 taken, of 40 rows" in out
    assert replay(killed) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
    assert audit(killed, step=2) == 0
    assert "6 demonstrations, in the order in which they were trained on" in capsys.readouterr().out
    losses = [r["weights/demonstrations/loss"] for r in by_step(killed.metrics) if "weights/demonstrations/loss" in r]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


def test_the_audit_is_red_when_the_order_of_two_is_changed(
    undisturbed: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = undisturbed.buffer / "ledger.sqlite"
    with closing(sqlite3.connect(ledger)) as db, db:
        before = db.execute("SELECT place, draw, line, digest FROM demonstrations WHERE serial = 3").fetchall()
        for place, other in ((1, 2), (2, 1)):
            values = (*next(row[1:] for row in before if row[0] == other), place)
            db.execute(
                "UPDATE demonstrations SET draw = ?, line = ?, digest = ? WHERE serial = 3 AND place = ?", values
            )
    mend(undisturbed.buffer)  # the chain of commits bears the change
    assert audit(undisturbed) == 1
    out = capsys.readouterr().out
    assert "VIOLATION of demonstrations: batch 2 of branch 0 takes the demonstrations 12, 14, 13, 15, 16, 17" in out
    assert "not the 6 of the ledger in their order" in out
