"""A run with the real processes whose episodes have twenty turns with sleeping tools, to be killed in their middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.witnesses import gather
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Trajectory
from tests.counting_env import TURNS, Step, carried_out, sampled_again
from tests.launched import ROOT, end, pid
from tests.waiting import until

START_S = 240.0
"""On a machine that is busy with other things, starting torch takes a minute."""


class Played(NamedTuple):
    """A run, and what its environments carried out."""

    run: RunFolder
    steps: Sequence[Step]


class LongRun:
    """A run whose episodes have twenty turns, and the environment's log of them."""

    def __init__(
        self, folder: Path, environment: str, turns: str, steps: int, *, score: str = "", **sections: dict[str, Any]
    ) -> None:
        """`score`: a group score. `sections`: further fields of the config, by section."""
        tokenizer = build_tokenizer()
        for part in (build_model(tokenizer, positions=512), tokenizer):
            part.save_pretrained(folder / "model")
        self.folder, self.log, self.run = folder, folder / "steps.log", RunFolder(folder / "run")
        self.left: list[Played] = []
        config = {
            "model": {"path": str(folder / "model")},
            "env": {
                "name": f"tests.counting_env:{environment}", "options": {"log": str(self.log)},
                "max_turns": TURNS, "max_tokens": 512, "group_score": score,
            },
            "actors": {"count": 1, "slots": 4, "max_new_tokens": 8, "drain_s": 1.0},
            "buffer": {"turns": turns, "max_staleness": 50, "capacity": 64, "keep": "all", "lease_s": 10.0},
            "learner": {"groups_per_step": 1, "group_size": 4, "steps": steps, "checkpoint_every": 1},
            "eval": {"tasks": 0},
            "launch": {"runs_dir": str(folder), "name": "run", "restarts": 1000},
        }  # fmt: skip
        for section, fields in sections.items():
            config[section] |= fields
        (folder / "config.json").write_text(json.dumps(config))
        self.launcher = self._launch("--config", str(folder / "config.json"))

    def _launch(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "asyncrl", "launch", *words],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()[-3000:]

    def pid(self, role: str) -> int:
        """0: it is not there."""
        if role == "launcher":
            return self.launcher.pid
        return pid(self.run, role)

    def kill(self, role: str, *, of: signal.Signals = signal.SIGKILL, whole: bool = False) -> None:
        """Kill a process, and wait until its successor is there. `whole`: with all that it has started, as when its
        host is lost."""
        before = self.pid(role)
        pids = [before, *(each.pid for each in psutil.Process(before).children(recursive=True) if whole)]
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, of)
        assert until(lambda: self.pid(role) not in (0, before), START_S), self.out

    def kill_all(self, *words: str) -> None:
        """Kill the launcher with all roles, and launch the run again."""
        self._kill_all()
        self.launcher = self._launch("--resume", str(self.run.path), *words)

    def fork(self, *words: str) -> None:
        """Kill the launcher with all roles, and begin a new run from a checkpoint of this one, which is left."""
        self._kill_all()
        self.left.append(self.played())
        self.run.remove_temporary()
        name = f"run-{len(self.left)}"
        self.launcher = self._launch("--fork", str(self.run.path), "--launch.name", name, *words)
        self.run = RunFolder(self.folder / name)

    def _kill_all(self) -> None:
        self.launcher.kill()
        self.launcher.wait(10)
        kill_all(of_run(self.run.id))

    def stop_and_resume(self) -> None:
        """As with Ctrl-C in the evening, and `--resume` in the morning."""
        self.end()
        self.launcher = self._launch("--resume", str(self.run.path))

    def checkpoint_steps(self) -> list[int]:
        """Of the branch that began last, where it has any."""
        states = [read_list(path)[0] for path in complete(self.run.checkpoints)]
        return sorted({state.version for state in states})

    def steps(self) -> list[Step]:
        """Of this run, and of those that it was forked from."""
        return carried_out(self.log)

    def played(self) -> Played:
        """This run, with the steps since it began: where it was forked, nothing of the other ran any more."""
        return Played(self.run, self.steps()[sum(len(each.steps) for each in self.left) :])

    def end(self) -> None:
        self.launcher.send_signal(signal.SIGINT)
        self.launcher.wait(START_S)

    def close(self) -> None:
        end(self.launcher, self.run)


def stored(run: RunFolder) -> list[Trajectory]:
    ledger = read_ledger(run.buffer)
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        rows = [(ledger.groups[row.group], row) for row in ledger.trajectories.values()]
        # A checkpoint that was restored has only what a resume needs.
        return [decoded(group, row, files.read) for group, row in rows if group.payload]


def exact(run: RunFolder, *, agent: bool = False, summaries: bool = False) -> list[Trajectory]:
    """The stored trajectories: each action was carried out exactly once in the history of every one of them, and the
    audit finds nothing. An agent's reward comes with its last turn. `summaries`: there are turns that earn nothing,
    which the environment has not heard."""
    trajectories = stored(run)
    earned = [float(n) for n in range(1, TURNS + 1)]
    if agent:
        earned = [0.0] * (TURNS - 1) + earned[-1:]
    for t in trajectories:
        compared = t.rewards.get("group", 0.0)  # it comes with the last turn too
        rewards = [turn.reward for turn in t.turn_rewards if turn.reward or not summaries]
        assert rewards == [*earned[:-1], earned[-1] + compared], t.id
        assert t.turns == len(t.turn_rewards)
    with closing(PayloadFiles(run.buffer / "payloads")) as files:
        assert list(violations(gather(run, run.load_config(), files))) == []
    return trajectories


def none_was_sampled_twice(run: RunFolder, steps: Sequence[Step], form: str = "sample") -> int:
    """Of each place of an episode there is one sample, beside those that a new branch voided: in the ledger, and in
    what the environments saw. Returns the number of the samples of the first kind. `form`: of the ledger's rows; an
    agent's replies have that of a summary, since no environment steps behind them."""
    ledger = read_ledger(run.buffer)
    used: Counter[tuple[int, int, int]] = Counter()
    texts: Counter[tuple[str, int]] = Counter()
    for row in ledger.tables["turns"]:
        if row["form"] != form:
            continue
        group = ledger.groups[row["grp"]]
        voided = row["ended"] in ("discarded_branch", "dropped")
        used[row["grp"], row["idx"], row["number"]] += not voided
        texts[f"{group.task_id}/{row['idx']}", row["number"] + 1] += 1
    assert max(used.values()) == 1, [place for place, count in used.items() if count > 1]
    unrecorded = {(step.key, step.count) for step in steps} - texts.keys()
    assert not unrecorded, "an action was recorded before it was carried out"
    assert sampled_again(steps, {place: count - 1 for place, count in texts.items()}) == 0
    return sum(used.values())
