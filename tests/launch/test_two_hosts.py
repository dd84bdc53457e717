"""A run over two hosts made of network namespaces: the actor on one, buffer and learner on the other, tcp with CURVE
between them; the cable cut for a while, then the actor's host lost and another in its place."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.command import audit
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.counting_env import TURNS, carried_out, sampled_again
from tests.launch.two_hosts import ENVIRONMENT, Hosts, two_hosts, why_not
from tests.long_run import exact, none_was_sampled_twice
from tests.waiting import until

ROOT = Path(__file__).parents[2]
WITHIN = "ASYNCRL_WITHIN_NAMESPACES"
PLACED = {"launch.name": "run", "launch.backend": "ray", "launch.host": "auto", "weights.channel": "zmq"}
SMALL = {
    "learner.groups_per_step": 4, "learner.group_size": 4, "learner.steps": 2000, "learner.checkpoint_every": 10,
    "buffer.capacity": 64, "buffer.lease_s": 6,
    "actors.count": 1, "actors.slots": 8, "actors.drain_s": 2, "eval.tasks": 0,
}  # fmt: skip
CUT_S = 8.0
STEPS_S = 120.0
LOST_HOSTS = 5
REJOINED_S = 300.0
"""Within which a host that took the place of another plays; Ray alone takes a minute on a busy machine."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


def unprivileged() -> list[str]:
    """The command that makes this user root of namespaces of its own; empty: it cannot, or need not."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    if os.geteuid() == 0 or WITHIN in os.environ or shutil.which("unshare") is None:
        return []
    return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else []


@contextlib.contextmanager
def launched(hosts: Hosts, folder: Path, values: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    """The actor on the second host, everything else on the first."""
    hosts.join(0, "home")
    hosts.join(1, "far")
    home = {"home": 1}
    values = PLACED | values | {
        "launch.runs_dir": folder, "ray.address": hosts.address,
        "ray.resources": json.dumps({"buffer": home, "learner": home, "weights": home, "actor": {"far": 1}}),
    }  # fmt: skip
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert until(lambda: len(hosts.pids(1)) > 3, STEPS_S), "Ray does not start on the second host"
    launcher = subprocess.Popen(
        hosts.on(0, sys.executable, "-m", "asyncrl", "launch", "--config", config, *words),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    try:
        yield launcher, RunFolder(folder / "run")
    finally:
        launcher.kill()
        launcher.communicate(timeout=10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["cut_cable_and_lost_host", "quickstart", "long_episodes_and_lost_hosts"])
def test_a_run_over_two_hosts(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    if within := unprivileged():
        here = f"{Path(__file__)}::test_a_run_over_two_hosts[{name}]"
        inner = [sys.executable, "-m", "pytest", "-q", "-m", "slow", here, "--basetemp", str(tmp_path / "in")]
        script = 'mount -t tmpfs none /run && exec "$@"'
        done = subprocess.run(
            [*within, "sh", "-c", script, "sh", *inner], cwd=ROOT, env={**os.environ, WITHIN: "1"},
            capture_output=True, text=True, timeout=1790,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return
    plays = (cut_cable_and_lost_host, quickstart, long_episodes_and_lost_hosts)
    play = next(each for each in plays if each.__name__ == name)
    play(request.getfixturevalue("hosts"), tmp_path)


def quickstart(hosts: Hosts, folder: Path) -> None:
    """Whole, as the README has it."""
    with launched(hosts, folder, {}) as (launcher, run):
        out, _ = launcher.communicate(timeout=560)
        assert launcher.returncode == 0, out
    assert json.loads(run.summary.read_text())["held_out_success_end"] >= 0.85, out
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0


def cut_cable_and_lost_host(hosts: Hosts, folder: Path) -> None:
    with launched(hosts, folder, SMALL) as (launcher, run):
        goes_on(run, 3)
        pid = run.record()["elsewhere"].get("actor-0", run.record()["processes"].get("actor-0"))[0]
        assert pid in hosts.pids(1)
        assert listens(run, "buffer").startswith(hosts.addresses[0]), "the actor reaches the buffer over the cable"

        hosts.cut()
        time.sleep(CUT_S)
        at_cut = steps(run)
        hosts.mend()
        assert until(lambda: steps(run) >= at_cut + 5, STEPS_S), "it does not go on over the mended cable"

        hosts.lose(1)
        assert hosts.pids(1) == []
        before = steps(run)
        hosts.join(1, "far")
        assert until(lambda: steps(run) >= before + 5, STEPS_S), "it does not go on with the new host"
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 130, out
    assert json.loads(run.summary.read_text())["restarts"].get("actor-0", 0) >= 1
    assert not run.private.exists(), "the keys are gone with the run"
    assert audit(run, step=None, format="json", out=run.path / "audit.json") == 0


def long_episodes_and_lost_hosts(hosts: Hosts, folder: Path) -> None:
    """The actor's host is lost again and again, with all that runs there, amid episodes of twenty turns."""
    tokenizer, log = build_tokenizer(), folder / "steps.log"
    for part in (build_model(tokenizer, positions=512), tokenizer):
        part.save_pretrained(folder / "model")
    values = SMALL | {
        "model.path": folder / "model", "data.source": "lookup",
        "env.name": "tests.counting_env:WithSnapshots", "env.options": json.dumps({"log": str(log)}),
        "env.max_turns": TURNS, "env.max_tokens": 512, "actors.slots": 4, "actors.max_new_tokens": 8,
        "buffer.turns": "on", "buffer.keep": "all", "buffer.max_staleness": 50,
        "learner.groups_per_step": 1, "learner.group_size": 4, "learner.checkpoint_every": 1, "launch.restarts": 1000,
    }  # fmt: skip
    with launched(hosts, folder, values) as (launcher, run):
        seen = 0
        for lost in range(LOST_HOSTS):
            enough = seen + 4 * 7 + 5 * lost  # the middle of the episodes, somewhere else each time
            assert until(lambda enough=enough: len(carried_out(log)) >= enough, REJOINED_S), (
                f"no turns after {lost} losses"
            )
            hosts.lose(1)
            seen = len(carried_out(log))
            hosts.join(1, "far")
        assert until(lambda: len(carried_out(log)) >= seen + 8 * TURNS, REJOINED_S), "no turns"
        launcher.send_signal(signal.SIGINT)
        out, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 130, out
    trajectories, again = exact(run), carried_out(log)
    none_was_sampled_twice(run, again)
    resumed = sum(t.attempt > 0 for t in trajectories)
    print(f"{LOST_HOSTS} lost hosts: {resumed} of {len(trajectories)} trajectories were resumed")
    assert resumed > LOST_HOSTS
    assert sampled_again(again) == 0


def goes_on(run: RunFolder, by: int) -> None:
    before = steps(run)
    assert until(lambda: steps(run) >= before + by, STEPS_S), "no steps"


def steps(run: RunFolder) -> int:
    return max((int(r["step"]) for r in by_step(run.metrics)), default=0) if run.metrics.is_file() else 0


def listens(run: RunFolder, role: str) -> str:
    return (run.private / role).read_text().removeprefix("tcp://")
