"""The whole loop with the real processes: actors, buffer, learner, started by the command that a user gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.command import audit
from asyncrl.launch.preflight import living
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.sinks.jsonl import by_step
from tests.waiting import until

SMALL = {
    "learner.groups_per_step": 4,
    "learner.group_size": 4,
    "learner.checkpoint_every": 4,
    "buffer.capacity": 64,
    "actors.count": 1,
    "actors.slots": 16,
    "eval.tasks": 8,
}
DEADLINE_S = 110.0
SLOW_S = 300.0
"""On a machine that is busy with other things, starting torch takes a minute."""
Launch = Callable[..., "tuple[subprocess.Popen[str], RunFolder]"]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[tuple[subprocess.Popen[str], RunFolder]] = []
    config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    run = RunFolder(tmp_path / "runs" / "run")

    def start(*, resume: bool = False, **fields: object) -> tuple[subprocess.Popen[str], RunFolder]:
        if resume:
            words = ["--resume", str(run.path)]
        else:
            values = SMALL | {name.replace("__", "."): value for name, value in fields.items()}
            values |= {"launch.runs_dir": run.path.parent, "launch.name": run.name}
            words = ["--config", str(config)]
            words += [word for name, value in values.items() for word in (f"--{name}", str(value))]
        known = run.id if resume else None
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "launch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
        )
        started.append((process, run))
        assert until(lambda: (run.path / "run.json").is_file() and run_id(run) not in ("", known), 60), output(process)
        return process, run

    yield start
    for process, folder in started:
        process.kill()
        process.communicate(timeout=10)
        kill_all(of_run(folder.id))
        folder.remove_temporary()


def run_id(run: RunFolder) -> str:
    text = (run.path / "run.json").read_text()
    return str(json.loads(text)["id"]) if text else ""


def output(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate(timeout=10)[0]


def steps(run: RunFolder) -> int:
    return max((int(r["step"]) for r in by_step(run.metrics)), default=0)


def pid(run: RunFolder, role: str) -> int:
    return int(run.record()["processes"].get(role, [0])[0])


def nothing_left(run: RunFolder) -> list[str]:
    until(lambda: not living(run), 5.0)
    return list(living(run).values())


def test_a_run_from_its_first_ticket_to_its_report(launch: Launch) -> None:
    launcher, run = launch(learner__steps=5)
    sockets, shm = run.sockets, run.shm
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, out

    summary = json.loads(run.summary.read_text())
    assert (summary["outcome"], summary["steps"], summary["restarts"]) == ("finished", 5, {})
    assert 0 < summary["max_staleness_seen"] <= 2
    assert 0.0 <= summary["held_out_success_start"] <= 1.0
    assert 0.0 <= summary["held_out_success_end"] <= 1.0
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert {"asyncrl", "torch", "transformers"} <= set(summary["versions"])

    records = by_step(run.metrics)
    assert [int(r["step"]) for r in records if "reward/mean" in r] == [1, 2, 3, 4, 5]
    assert all(r["staleness/max"] <= 2 for r in records if "staleness/max" in r)
    assert records[-1]["system/unknown_series"] == 0
    states = [records[-1][f"buffer/groups/{s}"] for s in ("in_flight", "waiting", "assigned", "trained", "dropped")]
    assert sum(states) == records[-1]["buffer/groups/issued"]

    assert {path.stem for path in run.logs.glob("*.log")} == {"actor-0", "buffer", "learner"}
    assert (run.checkpoints / "step-000005").is_dir()
    assert run.load_config().learner.steps == 5
    assert "<html" in run.report.read_text()
    assert list(run.plots.glob("*.png"))
    assert "step 5/5" in out
    assert str(run.path) in out

    assert nothing_left(run) == []
    assert not sockets.exists()
    assert not shm.exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_process_killed_dead_and_the_run_goes_on(launch: Launch) -> None:
    launcher, run = launch(learner__steps=500, eval__tasks=0)
    assert until(lambda: steps(run) >= 2, SLOW_S), output(launcher)
    deaths = {"actor-0": signal.SIGKILL, "buffer": signal.SIGKILL, "learner": signal.SIGKILL}
    for role, number in (*deaths.items(), ("learner", signal.SIGTERM)):  # that of the launcher is another matter
        before, had = pid(run, role), steps(run)
        os.kill(before, number)
        assert until(lambda role=role, before=before: pid(run, role) != before, DEADLINE_S), (
            f"{role} is gone\n{output(launcher)}"
        )
        # The learner redoes what came after its checkpoint.
        assert until(lambda had=had: steps(run) >= had + 6, SLOW_S), f"stuck after {role} ended\n{output(launcher)}"
    trained = steps(run)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert "--resume" in out
    assert nothing_left(run) == []
    saved = sorted(run.checkpoints.glob("step-*"))[-1]
    assert int(saved.name.removeprefix("step-")) >= trained, "a stop in order writes its checkpoint"

    launcher, run = launch(resume=True)
    assert until(lambda: steps(run) >= trained + 3, SLOW_S), output(launcher)
    sockets, shm = run.sockets, run.shm
    launcher.kill()
    launcher.wait(10)
    assert nothing_left(run) == []
    assert until(lambda: not sockets.exists() and not shm.exists(), 10.0)
    assert max(r.get("staleness/max", 0.0) for r in by_step(run.metrics)) <= 2


@pytest.mark.system
def test_two_ranks_train_together(launch: Launch) -> None:
    launcher, run = launch(
        learner__backend="fsdp2", learner__ranks=2, learner__steps=3, learner__checkpoint_every=2, eval__tasks=0
    )
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0, out
    records = by_step(run.metrics)
    assert [int(r["step"]) for r in records if "reward/mean" in r] == [1, 2, 3]
    assert {path.stem for path in run.logs.glob("learner*.log")} == {"learner", "learner-1"}
    assert (run.checkpoints / "step-000003" / "dcp" / ".metadata").is_file()
    assert audited(run) == 0
    assert nothing_left(run) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_either_of_two_ranks_killed_dead_and_both_go_on(launch: Launch) -> None:
    launcher, run = launch(learner__backend="fsdp2", learner__ranks=2, learner__steps=500, eval__tasks=0)
    assert until(lambda: steps(run) >= 2, SLOW_S), output(launcher)
    for role in ("learner-1", "learner"):
        before, had = {r: pid(run, r) for r in ("learner", "learner-1")}, steps(run)
        os.kill(before[role], signal.SIGKILL)
        assert until(lambda before=before: all(pid(run, r) != p for r, p in before.items()), DEADLINE_S), output(
            launcher
        )
        assert until(lambda had=had: steps(run) >= had + 6, SLOW_S), f"stuck after {role} ended\n{output(launcher)}"
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 130
    assert nothing_left(run) == []
    assert audited(run) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_branch_at_an_earlier_step_and_a_run_forked_from_it(launch: Launch) -> None:
    launcher, run = launch(learner__steps=6, learner__checkpoint_every=3, eval__tasks=0)
    assert launcher.wait(SLOW_S) == 0, output(launcher)

    def again(*words: str) -> None:
        command = [sys.executable, "-m", "asyncrl", "launch", *words]
        subprocess.run(command, check=True, timeout=SLOW_S, stdout=subprocess.DEVNULL)

    again("--resume", str(run.path), "--at-step", "3", "--fresh")
    assert (run.checkpoints / "step-000006-b000006-br1").is_dir()
    assert audited(run) == 0
    again("--fork", str(run.path), "--launch.name", "forked", "--learner.steps", "8")
    forked = RunFolder(run.path.with_name("forked"))
    assert [int(r["step"]) for r in by_step(forked.metrics) if "reward/mean" in r] == [7, 8]
    assert audited(forked) == 0
    assert audited(run) == 0, "what it began from is as it was"


FSDP2 = ["--learner.backend", "fsdp2"]
MEGATRON = ["--learner.backend", "megatron", "--learner.backend-options", '{"tensor_parallel": 2}']
PIPELINE = ["--learner.backend", "megatron", "--learner.backend-options", '{"pipeline_parallel": 2}']


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", [FSDP2, MEGATRON, PIPELINE], ids=["fsdp2", "megatron", "pipeline"])
def test_the_quickstart_on_two_ranks(tmp_path: Path, backend: list[str]) -> None:
    if backend is not FSDP2:
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    assert quickstart(tmp_path, *backend, "--learner.ranks", "2")["held_out_success_end"] >= 0.9


def quickstart(folder: Path, *words: str) -> dict[str, Any]:
    """The summary of a run of the whole of it."""
    config = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
    words = ("--config", str(config), *words, "--launch.runs-dir", str(folder), "--launch.name", "run")
    subprocess.run([sys.executable, "-m", "asyncrl", "launch", *words], check=True, timeout=1400)
    found: dict[str, Any] = json.loads(RunFolder(folder / "run").summary.read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_with_adapters(tmp_path: Path) -> None:
    """Adapters of rank 16 come near what all weights reach in as many steps."""
    found = quickstart(tmp_path, "--learner.lora.r", "16", "--learner.lr", "5e-3")
    assert found["held_out_success_end"] >= 0.8
    assert (tmp_path / "run" / "checkpoints" / "step-000100" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_with_a_critic(launch: Launch, critic: str) -> None:
    launcher, run = launch(
        learner__advantage="gae",
        learner__critic=critic,
        learner__critic_lr=1e-3,
        learner__critic_warmup_steps=1,
        learner__steps=4,
        learner__checkpoint_every=2,
        eval__tasks=0,
    )
    out, _ = launcher.communicate(timeout=SLOW_S)
    assert launcher.returncode == 0, out
    records = [r for r in by_step(run.metrics) if "weights/value_loss" in r]
    assert [int(r["step"]) for r in records] == [1, 2, 3, 4]
    assert [r["weights/lr"] > 0 for r in records] == [False, True, True, True]
    assert records[0]["weights/value_mean"] == 0.0
    assert records[-1]["weights/value_mean"] != 0.0
    assert (run.checkpoints / "step-000004" / "critic" / "head.pt").is_file()
    # Policy and critic go on from the checkpoint exactly as they did.
    words = [sys.executable, "-m", "asyncrl", "replay", str(run.path), "--from-step", "2"]
    assert subprocess.run(words, timeout=SLOW_S, stdout=subprocess.DEVNULL).returncode == 0


def audited(run: RunFolder) -> int:
    return audit(run, step=None, format="json", out=run.path / "audit.json")
