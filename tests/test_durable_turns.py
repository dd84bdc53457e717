"""Actors, buffer and launcher are killed in the middle of episodes of twenty turns, with the real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.audit.summary import figures
from asyncrl.audit.witnesses import gather
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Trajectory
from tests.counting_env import TURNS, Step, carried_out, carried_out_again, sampled_again
from tests.waiting import until

ROOT = Path(__file__).parents[1]
START_S = 240.0
"""On a machine that is busy with other things, starting torch takes a minute."""


class LongRun:
    """A run whose episodes have twenty turns, and the environment's log of them."""

    def __init__(
        self,
        folder: Path,
        env: str,
        turns: str,
        steps: int,
        score: str = "",
        actors: int = 1,
        **sections: dict[str, Any],
    ) -> None:
        """`score`: a group score. `sections`: further fields of the config, by section."""
        tokenizer = build_tokenizer()
        for part in (build_model(tokenizer, positions=512), tokenizer):
            part.save_pretrained(folder / "model")
        self.env = env
        self.folder, self.log, self.run = folder, folder / "steps.log", RunFolder(folder / "run")
        config = {
            "model": {"path": str(folder / "model")},
            "env": {
                "name": f"tests.counting_env:{env}", "options": {"log": str(self.log)},
                "max_turns": TURNS, "max_tokens": 512, "group_score": score,
            },
            "actors": {"count": actors, "slots": 4 // actors, "max_new_tokens": 8, "drain_s": 1.0},
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
        path = self.run.path / "run.json"
        if not path.is_file() or not path.read_text():
            return 0
        return int(self.run.record()["processes"].get(role, [0])[0])

    def kill(self, role: str, *, of: signal.Signals = signal.SIGKILL, whole: bool = False) -> None:
        """Kill a process, and wait until its successor is there. `whole`: with all that it has started, as when its
        host is lost."""
        before = self.pid(role)
        pids = [before, *(each.pid for each in psutil.Process(before).children(recursive=True) if whole)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, of)
        assert until(lambda: self.pid(role) not in (0, before), START_S), self.out

    def kill_all(self, *words: str) -> None:
        """Kill the launcher with all roles, and launch the run again."""
        self.launcher.kill()
        self.launcher.wait(10)
        kill_all(of_run(self.run.id))
        self.launcher = self._launch("--resume", str(self.run.path), *words)

    def checkpoint_steps(self) -> list[int]:
        """Of the branch that began last, where it has any."""
        states = [read_list(path)[0] for path in complete(self.run.checkpoints)]
        return sorted({state.version for state in states})

    def steps(self) -> list[Step]:
        return carried_out(self.log)

    def end(self) -> None:
        self.launcher.send_signal(signal.SIGINT)
        self.launcher.wait(START_S)

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait(10)
        if (self.run.path / "run.json").is_file():
            kill_all(of_run(self.run.id))
            self.run.remove_temporary()

    def stored(self) -> list[Trajectory]:
        ledger = read_ledger(self.run.buffer)
        with closing(PayloadFiles(self.run.buffer / "payloads")) as files:
            rows = [(ledger.groups[row.group], row) for row in ledger.trajectories.values()]
            # A checkpoint that was restored has only what a resume needs.
            return [decoded(group, row, files.read) for group, row in rows if group.payload]

    def audited(self) -> list[str]:
        with closing(PayloadFiles(self.run.buffer / "payloads")) as files:
            return list(violations(gather(self.run, self.run.load_config(), files)))


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Any]:
    begun: list[LongRun] = []

    def begin(*about: Any, **options: Any) -> LongRun:
        begun.append(LongRun(tmp_path, *about, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def exact(run: LongRun) -> list[Trajectory]:
    """Each action was carried out exactly once in the history of every stored trajectory. An agent's reward comes with
    its last turn."""
    trajectories = run.stored()
    earned = [float(n) for n in range(1, TURNS + 1)]
    if run.env == "agent":
        earned = [0.0] * (TURNS - 1) + earned[-1:]
    for t in trajectories:
        compared = t.rewards.get("group", 0.0)  # it comes with the last turn too
        assert [turn.reward for turn in t.turn_rewards] == [*earned[:-1], earned[-1] + compared], t.id
        assert t.turns == TURNS
    assert run.audited() == []
    return trajectories


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("env", "turns", "score"),
    [
        pytest.param("WithSnapshots", "on", ""),
        pytest.param("agent", "on", "", marks=pytest.mark.slow),
        pytest.param("WithSnapshots", "on", "tests.counting_env:compare", marks=pytest.mark.slow),
        pytest.param("Again", "on", "", marks=pytest.mark.slow),
        pytest.param("WithSnapshots", "off", "", marks=pytest.mark.slow),
        pytest.param("agent", "off", "", marks=pytest.mark.slow),
    ],
)
def test_an_actor_killed_in_the_middle_of_its_episodes_costs_no_turn(
    long_run: Any, env: str, turns: str, score: str
) -> None:
    run = long_run(env, turns, steps=2, score=score)
    for kill in range(2):
        # Twelve turns of four episodes: the middle, wherever each of them is.
        enough = (4 * 12, 4 * 12 + 4 * TURNS)[kill]
        assert until(lambda enough=enough: len(run.steps()) >= enough, START_S), run.out
        run.kill("actor-0")
    assert run.launcher.wait(START_S) == 0, run.out
    trajectories = exact(run)
    assert len(trajectories) >= 8
    again = sampled_again(run.steps())
    if score:
        assert [t.rewards["group"] for t in trajectories] == [float(t.id.index) for t in trajectories]
    print(f"{env}, turns {turns} {score}: {again} tokens sampled again after 2 kills, {again / 2:.0f} a kill")
    if turns == "off":
        assert again > 0, "the measure notices what is sampled again"
        return
    assert again == 0
    ended = {row["ended"] for row in read_ledger(run.run.buffer).tables["turns"]}
    assert "continued" in ended
    assert not ended & {"failed", "diverged", "lost", "stale"}
    assert any(t.attempt for t in trajectories), "some episodes went on in another attempt"


WAYS = {"actor": 8, "host of an actor": 3, "actor leaves": 3, "buffer": 5, "launcher": 3, "fork": 3}
"""Ways to interrupt a run, with the weights by which they are drawn."""


def interrupt(run: LongRun, way: str, rng: random.Random) -> None:
    actor = f"actor-{rng.randrange(2)}"
    match way:
        case "actor":
            run.kill(actor)
        case "host of an actor":
            run.kill(actor, whole=True)
        case "actor leaves":
            run.kill(actor, of=signal.SIGTERM)
        case "buffer":
            run.kill("buffer")
        case "launcher":
            run.kill_all()
        case "fork":  # a new branch from a checkpoint, while the episodes of the one before are in flight
            steps = run.checkpoint_steps()
            run.kill_all(*(["--fresh", "--at-step", str(rng.choice(steps[-2:]))] if steps else []))


def none_was_sampled_twice(run: LongRun) -> int:
    """Of each place of an episode there is one sample, beside those that a new branch voided: in the ledger, and in
    what the environments saw. Returns the number of the samples of the first kind."""
    ledger = read_ledger(run.run.buffer)
    used: Counter[tuple[int, int, int]] = Counter()
    texts: Counter[tuple[str, int]] = Counter()
    for row in ledger.tables["turns"]:
        if row["form"] != "sample":
            continue
        group = ledger.groups[row["grp"]]
        voided = row["ended"] in ("discarded_branch", "dropped")
        used[row["grp"], row["idx"], row["number"]] += not voided
        texts[f"{group.task_id}/{row['idx']}", row["number"] + 1] += 1
    assert max(used.values()) == 1, [place for place, count in used.items() if count > 1]
    steps = run.steps()
    unrecorded = {(step.key, step.count) for step in steps} - texts.keys()
    assert not unrecorded, "an action was recorded before it was carried out"
    assert sampled_again(steps, {place: count - 1 for place, count in texts.items()}) == 0
    return sum(used.values())


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("env", ["WithSnapshots", "Again", "agent"])
def test_kills_at_random_turns_lose_none(long_run: Any, env: str) -> None:
    """`ASYNCRL_TEST_KILLS` (200) of actors, their hosts, the buffer and all processes at once, which are resumed, or
    begin a new branch."""
    kills, rng = int(os.environ.get("ASYNCRL_TEST_KILLS", "200")), random.Random(env)
    workers = {"workers": "threads" if env == "agent" else "processes"}
    run, seen, ways = long_run(env, "on", steps=100_000, actors=2, env=workers), 0, Counter[str]()
    began = time.monotonic()
    for number in range(kills):
        enough = seen + rng.randrange(8, 40)  # somewhere else in the episodes each time
        assert until(lambda enough=enough: len(run.steps()) >= enough, START_S), f"kill {number} {ways}\n{run.out}"
        there = lambda: all(run.pid(role) for role in ("buffer", "actor-0", "actor-1"))  # noqa: E731
        assert until(there, START_S), run.out
        time.sleep(rng.uniform(0.0, 0.1))
        seen = len(run.steps())
        (way,) = rng.choices(list(WAYS), list(WAYS.values()))
        interrupt(run, way, rng)
        ways[way] += 1
    enough = seen + 8 * TURNS
    assert until(lambda: len(run.steps()) >= enough, START_S), run.out
    run.end()
    trajectories, samples, steps = exact(run), none_was_sampled_twice(run), run.steps()
    ended = Counter(row["ended"] or "kept" for row in read_ledger(run.run.buffer).tables["turns"])
    print(
        f"{env}: {kills} kills ({dict(ways)}) in {time.monotonic() - began:.0f} s, {len(trajectories)} trajectories, "
        f"{samples} samples; {carried_out_again(steps)} actions carried out again in abandoned copies; {dict(ended)}"
    )
    assert not ended.keys() & {"failed", "diverged", "lost", "stale", "anew"}
    reasons = {group.reason for group in read_ledger(run.run.buffer).groups.values()} - {None}
    assert reasons <= {"discarded_branch"}, "nothing but a new branch drops a group"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_host_of_the_buffer_costs_the_turns_since_the_checkpoint(long_run: Any) -> None:
    """Episodes that were in flight then go on, on a new branch, with the turns that the checkpoint has."""
    run = long_run("WithSnapshots", "on", steps=100_000)
    assert until(lambda: len(list(run.run.checkpoints.glob("step-*"))) >= 2, START_S), run.out
    seen = len(run.steps())
    assert until(lambda: len(run.steps()) >= seen + 13, START_S), run.out
    os.kill(run.pid("buffer"), signal.SIGKILL)
    shutil.rmtree(run.run.buffer)
    assert until(lambda: bool(list(run.run.checkpoints.glob("step-*-br1"))), 2 * START_S), run.out
    run.end()
    exact(run)
    ledger = read_ledger(run.run.buffer)
    lent = {(a.group, a.index, a.attempt): a.branch for attempts in ledger.attempts.values() for a in attempts}
    continued = [row for row in ledger.tables["turns"] if row["ended"] == "continued"]
    before = [row for row in continued if lent[row["grp"], row["idx"], row["attempt"]] == 0]
    went_on = [row for row in before if ledger.trajectories[row["grp"], row["idx"]].branch == 1]
    assert went_on, "turns of the branch before are in trajectories of this one"
    with closing(PayloadFiles(run.run.buffer / "payloads")) as files:
        lost = figures(gather(run.run, run.run.load_config(), files)).lost_turns
    print(f"{len(went_on)} recorded turns went on, {len(lost)} were lost with the host")
