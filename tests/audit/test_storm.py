"""A storm: one run is killed again and again, and resumed with forks, `--fresh` and changed fields among the resumes.

After every kill the account is audited and a replay is made, from a checkpoint at random or from the initial model.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.replay import on_the_line, replay
from asyncrl.errors import RunError
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from tests.audit.test_resumed_with_changes import ROOT, SMALL, launched
from tests.waiting import until

KILLS = int(os.environ.get("ASYNCRL_STORM_KILLS", "30"))
SEED = int(os.environ.get("ASYNCRL_STORM_SEED", "0"))
STORMS = 3
CHANGES = {
    "--learner.lr": ("1e-3", "5e-4", "2e-3"),
    "--learner.steps": ("400", "600", "900"),
    "--learner.schedule": ("linear", "cosine", "constant"),
    "--learner.seed": ("1", "2"),
    "--learner.entropy-coef": ("0.0", "0.01"),
    "--learner.threads": ("1", "2"),
    "--learner.checkpoint-every": ("2", "3", "5"),
    "--actors.seed": ("1", "2"),
    "--weights.every": ("1", "2"),
    "--buffer.capacity": ("32", "48"),
}
"""Fields of the kinds `branch` and `free`, and their values."""


class Storm:
    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.runs = [RunFolder(folder / "run-0")]
        self.done: Counter[str] = Counter()

    @property
    def run(self) -> RunFolder:
        return self.runs[-1]

    def words(self) -> list[str]:
        """How the run is continued, chosen at random."""
        if not (self.run.path / "run.json").is_file():
            values = SMALL | {"learner.steps": 600, "learner.lr": 1e-3}
            place = {"launch.runs_dir": self.folder, "launch.name": self.run.name}
            flags = [word for name, value in (values | place).items() for word in (f"--{name}", str(value))]
            return self._counted("new", ["--config", str(ROOT / "configs" / "quickstart.yaml"), *flags])
        resume, checkpoints = ["--resume", str(self.run.path)], self._steps()
        kind = self.rng.choice(["plain", "plain", "changed", "changed", "fresh", "fork"])
        if kind in ("fresh", "fork") and not checkpoints:
            kind = "plain"
        match kind:
            case "changed":
                names = self.rng.sample(sorted(CHANGES), self.rng.choice([1, 2]))
                return self._counted(kind, [*resume, *(w for n in names for w in (n, self.rng.choice(CHANGES[n])))])
            case "fresh":
                return self._counted(kind, [*resume, "--fresh", "--at-step", str(self.rng.choice(checkpoints[-3:]))])
            case "fork":
                source = self.run
                self.runs.append(RunFolder(self.folder / f"run-{len(self.runs)}"))
                words = ["--fork", str(source.path), "--launch.name", self.run.name]
                return self._counted(kind, [*words, "--at-step", str(self.rng.choice(checkpoints[-2:]))])
        return self._counted("plain", resume)

    def kill(self, words: list[str]) -> None:
        """Launches, kills a process at a random moment, and at last all of them: three times of four after some
        training steps, else at any time from the start of the launcher on."""
        launcher = launched(*words)
        started, steps = time.time(), self.rng.choice([None, 1, 3, 6])
        begun = time.monotonic()
        try:
            lasts = self.rng.uniform(0.5, 12.0) if steps is None else 120.0
            single = begun + self.rng.uniform(0.3, 1.5) * min(lasts, 20.0)
            while time.monotonic() < begun + lasts and launcher.poll() is None:
                if steps is not None and self._trained_since(started) >= steps:
                    break
                if time.monotonic() > single:
                    self._kill_one()
                    single = float("inf")
                time.sleep(0.1)
            early = launcher.poll()
        finally:
            launcher.kill()
            out, _ = launcher.communicate(timeout=60)
        assert early is None, f"the launch ended with {early}: {words}\n{out}"
        if self._begun():
            assert until(lambda: not living(self.run), 60.0)

    def check(self, capsys: pytest.CaptureFixture[str]) -> None:
        run, ledger = self.run, self._ledger()
        if self._cut_off():
            shutil.rmtree(run.path, ignore_errors=True)
            if len(self.runs) > 1:
                self.runs.pop()  # a fork; it is refused, and so begun again
            self.done["cut off"] += 1
            return
        if ledger is None:
            self.done["without a ledger"] += 1
            return
        assert audit(run) == 0, f"{dict(self.done)}\n{capsys.readouterr().out}"
        self.done["audits"] += 1
        step = self.rng.choice([0, *on_the_line(run, ledger)])
        try:
            same = replay(run, from_step=step) == 0
        except RunError as error:
            if "nothing can be replayed" not in str(error):
                raise
            self.done["nothing to replay"] += 1
            return
        said = capsys.readouterr().out
        assert same, f"from {step}, {dict(self.done)}\n{said}"
        self.done["replays"] += 1
        self.done["steps replayed"] += int(re.findall(r"replay: (\d+) steps", said)[-1])

    def _cut_off(self) -> bool:
        """Whether a new run, or a fork, was killed before its folder was whole."""
        if not self._begun():
            return True
        try:
            self.run.fresh_from()
        except RunError:
            return True
        return False

    def _trained_since(self, started: float) -> int:
        """Batches finished since then."""
        ledger = self._ledger() if self._begun() else None
        return sum((batch.finished_at or 0.0) > started for batch in ledger.batches) if ledger is not None else 0

    def _begun(self) -> bool:
        record = self.run.path / "run.json"
        return record.is_file() and record.stat().st_size > 0

    def _ledger(self) -> LedgerRows | None:
        """None before its tables are there."""
        try:
            return read_ledger(self.run.buffer)
        except RunError as error:
            if "holds no ledger" in str(error) or "version 0" in str(error):
                return None
            raise

    def _kill_one(self) -> None:
        found = living(self.run) if self._begun() else {}
        roles = [pid for pid, role in found.items() if role in ("learner", "buffer", "actor-0")]
        for pid in roles and [self.rng.choice(roles)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.done["single processes killed"] += 1

    def _steps(self) -> list[int]:
        """Of the checkpoints that are points of the recorded line, in order."""
        ledger = self._ledger()
        return [] if ledger is None else sorted(on_the_line(self.run, ledger))

    def _counted(self, kind: str, words: list[str]) -> list[str]:
        self.done[kind] += 1
        return words


@pytest.fixture
def storm(tmp_path: Path, number: int) -> Iterator[Storm]:
    storm = Storm(tmp_path, random.Random(SEED + number))
    yield storm
    for run in storm.runs:
        if (run.path / "run.json").is_file() and (run.path / "run.json").stat().st_size:
            kill_all(of_run(run.id))
            run.remove_temporary()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(STORMS))
def test_every_kill_leaves_a_run_that_can_be_proved(storm: Storm, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(KILLS):
        storm.kill(storm.words())
        storm.check(capsys)
        with capsys.disabled():
            print(dict(storm.done), flush=True)
