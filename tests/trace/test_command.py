"""`asyncrl trace` on a real run whose environment sleeps for a known time."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from asyncrl.cli.dispatch import main
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder
from tests.trace.reader import Read, read_trace
from tests.trace.sleeping import SLEEP_S

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 4
pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    folder = tmp_path_factory.mktemp("trace")
    config = asyncrl.Config.load(
        QUICKSTART,
        {
            "learner.groups_per_step": 2, "learner.group_size": 2, "learner.steps": STEPS, "buffer.capacity": 32,
            "buffer.keep": "all", "actors.count": 1, "actors.slots": 4, "actors.drain_s": 0.0, "eval.tasks": 0,
            "env.name": "tests.trace.sleeping:Sleeping", "env.options": {"folder": str(folder)},
            "launch.name": "run", "launch.runs_dir": str(folder),
        },
    )  # fmt: skip
    asyncrl.train(config)
    made = RunFolder(folder / "run")
    yield made
    kill_all(of_run(made.id))
    made.remove_temporary()


@pytest.fixture
def trace(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Read:
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(run.path), "--out", str(tmp_path / "trace.json.gz")])
    assert ended.value.code == 0
    assert "batch 0 to batch 3" in capsys.readouterr().out
    return read_trace(tmp_path / "trace.json.gz")


def test_what_the_environment_slept_is_on_the_tracks(run: RunFolder, trace: Read) -> None:
    shown = [s["end"] - s["begin"] for s in trace.of("actor-0", "environment")]
    slept = [json.loads(line) for file in run.path.parent.glob("slept-*") for line in file.read_text().splitlines()]
    assert len(shown) >= STEPS * 2 * 2 * 2
    assert min(shown) >= 0.95 * SLEEP_S
    assert sum(shown) / len(shown) == pytest.approx(sum(slept) / len(slept), rel=0.05)


def test_every_episode_of_a_batch_points_to_it(trace: Read) -> None:
    for number in range(STEPS):
        sources = [a["name"] for a, b in trace.arrows if b["name"] == f"batch {number}"]
        assert len(sources) == 4 == len(set(sources))
    for episode, batch in trace.arrows:
        assert episode["end"] <= batch["begin"] + 0.001


def test_the_processes_tell_what_they_did(trace: Read) -> None:
    steps = trace.of("learner", "step")
    assert [s["args"]["batch"] for s in steps] == [*range(STEPS)]
    by_batch = {step["args"]["batch"]: step for step in steps}
    for name in ("prepare", "forward and backward", "optimizer"):
        parts = trace.of("learner", name)
        # A batch whose gradient is exactly 0 has no optimizer step.
        assert len(parts) == STEPS or (name == "optimizer" and 0 < len(parts) < STEPS)
        for part in parts:
            step = by_batch[part["args"]["batch"]]
            assert step["ts"] - 1 <= part["ts"] <= part["ts"] + part["dur"] <= step["ts"] + step["dur"] + 1
    for batch, step in zip([trace.of("learner", f"batch {n}")[0] for n in range(STEPS)], steps, strict=True):
        assert batch["begin"] - 0.01 <= step["begin"] <= step["end"] <= batch["end"] + 0.01
    assert trace.of("learner", "wait: batch")
    assert trace.of("learner", "wait: publish")
    assert trace.of("buffer", "commit")
    assert [s["args"]["version"] for s in trace.of("actor-0", "load")] == sorted(
        {s["args"]["version"] for s in trace.of("actor-0", "load")}
    )
    assert trace.instants


def test_steps_are_chosen_and_mistakes_told(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", str(run.path), "--steps", "1", "--to-step", "2", "--out", str(tmp_path / "one.json")])
    batches = [s["name"] for s in read_trace(tmp_path / "one.json").slices if s["lane"] == "batches"]
    assert batches == ["batch 1"]
    capsys.readouterr()
    for words, sentence in (
        (["--steps", "0"], "--steps is 0"),
        (["--to-step", "0"], "the first batch led to step 1"),
        (["--out", "/no/such/trace.json"], "--out is /no/such/trace.json, which cannot be"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["trace", str(run.path), *words])
        assert ended.value.code != 0
        assert sentence in capsys.readouterr().err


@pytest.mark.skipif("ASYNCRL_TRACE_PROCESSOR" not in os.environ, reason="ASYNCRL_TRACE_PROCESSOR names no program")
def test_perfettos_own_processor_reads_it(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["trace", str(run.path), "--out", str(tmp_path / "trace.json")])
    query = tmp_path / "query.sql"
    query.write_text("select count(*) as n from flow;")
    command = [os.environ["ASYNCRL_TRACE_PROCESSOR"], "-q", str(query), str(tmp_path / "trace.json")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(said.split()[-1]) == len(read_trace(tmp_path / "trace.json").arrows)
