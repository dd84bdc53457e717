"""A run that is killed and resumed with other settings, as the documentation says: the account and the replay hold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import replay
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SMALL = {
    "learner.groups_per_step": 2, "learner.group_size": 2, "learner.steps": 60, "learner.schedule": "linear",
    "learner.checkpoint_every": 3, "learner.keep_checkpoints": 99, "buffer.capacity": 32, "buffer.keep": "all",
    "actors.count": 1, "actors.slots": 4, "actors.drain_s": 0.0, "eval.tasks": 0,
}  # fmt: skip
DEADLINE_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    run = RunFolder(tmp_path / "run")
    yield run
    if (run.path / "run.json").is_file():
        kill_all(of_run(run.id))
        run.remove_temporary()


def launched(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncrl", "launch", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out
    return out


def kill_past_a_checkpoint(run: RunFolder, process: subprocess.Popen[str]) -> int:
    """Kills everything at once; gives the step of the newest checkpoint, past which a version is published."""

    def newest() -> int:
        return max((int(p.name[5:11]) for p in run.checkpoints.glob("step-*")), default=0)

    def past() -> bool:
        return newest() >= 3 and max(v for _, v in ledger(run).published) > newest()

    assert until(past, DEADLINE_S), process.kill()
    process.kill()
    process.communicate(timeout=30)
    assert until(lambda: not living(run), 60.0)
    return newest()


def ledger(run: RunFolder) -> LedgerRows:
    return read_ledger(run.buffer)


def test_a_run_killed_past_its_checkpoint_and_resumed_with_another_number_of_steps(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    place = ["--launch.runs-dir", str(run.path.parent), "--launch.name", run.name]
    first = launched("--config", str(ROOT / "configs" / "quickstart.yaml"), *words, *place)
    k = kill_past_a_checkpoint(run, first)
    assert max(v for _, v in ledger(run).published) > k

    out = ended(launched("--resume", str(run.path), "--learner.steps", str(k + 4)))
    why = f"batch {k} was trained with other settings: learner.steps was 60 and is {k + 4}"
    assert f"warning: learner.steps was 60 and is {k + 4}" in out
    assert [(b.fork_batch, b.why) for b in ledger(run).branches.values()][1:] == [(k, why)]
    assert why in " ".join((run.path / "events.jsonl").read_text().split())
    assert audit(run) == 0, capsys.readouterr().out
    for step in (k, 0):  # also through the change: each step with the settings that it was trained with
        assert replay(run, from_step=step) == 0, capsys.readouterr().out

    ended(launched("--resume", str(run.path), "--learner.steps", str(k + 6), "--learner.lr", "5e-4"))
    assert len(ledger(run).branches) == 2, "nothing is redone"
    assert audit(run) == 0, capsys.readouterr().out
    assert replay(run) == 0, capsys.readouterr().out
