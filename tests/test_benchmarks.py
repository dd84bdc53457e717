"""What a benchmark lacks is said in one sentence before its first run, with what leaves that row out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.system
BENCH = Path(__file__).parents[1] / "scripts" / "bench"
LACKING = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.modules[sys.argv[3]] = None  # as if it were not installed
sys.argv = [f"{sys.argv[1]}/{sys.argv[2]}", *sys.argv[4:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def refused(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "", "it ran something"
    (sentence,) = done.stderr.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("script", "package", "remedy"),
    [
        ("overlap.py", "trl", "--no-trl"),
        ("overlap.py", "datasets", "--no-trl"),
        ("buffer.py", "redis", "--without redis"),
        ("buffer.py", "ray", "--without ray"),
        ("learner.py", "peft", "--without lora"),
        ("actor.py", "vllm", "make test-vllm"),
    ],
)
def test_a_package_that_is_missing_is_named_before_the_first_run(
    tmp_path: Path, script: str, package: str, remedy: str
) -> None:
    others = ["--without", "redis"] if package == "ray" else []
    out = tmp_path / "results.json"
    said = refused(sys.executable, "-c", LACKING, str(BENCH), script, package, "--out", str(out), *others)
    assert package in said
    assert remedy in said
    assert not list(tmp_path.iterdir())


def test_it_is_looked_for_in_the_python_that_will_run_it(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    bare = str(tmp_path / "bare" / "bin" / "python")
    said = refused(sys.executable, str(BENCH / "overlap.py"), "--trl-python", bare, "--out", str(tmp_path / "o.json"))
    assert f"trl, datasets, accelerate, which {bare} does not find" in said
    said = refused(sys.executable, str(BENCH / "overlap.py"), "--trl-python", "nowhere/python")
    assert "nowhere/python does not run" in said


@pytest.mark.parametrize("changes", [{}, {"learner": {"groups_per_step": 4}}, {"actors": {"threads": 2}}])
def test_all_arrangements_of_overlap_have_the_actor_that_generates_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import overlap

    actors = yaml.safe_load(overlap._config(tmp_path, changes, 12).read_text())["actors"]
    assert (actors["count"], actors["slots"]) == (1, 96)


def test_what_there_is_so_far_is_on_the_disk_and_earlier_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import results

    out, part = tmp_path / "made" / "one.json", tmp_path / "made" / "one.part.json"
    results.finish(out, "earlier")
    results.keep(out, ["first"])
    assert (out.read_text(), part.read_text()) == ('"earlier"\n', '[\n "first"\n]\n')
    results.finish(out, ["first", "second"])
    assert out.read_text() == '[\n "first",\n "second"\n]\n'
    assert not part.exists()


@pytest.mark.timeout(330)
def test_the_bench_of_the_buffer_runs_to_its_end(tmp_path: Path) -> None:
    """Its puts must be such as the buffer takes: each has an actor, a place in its log and a length within bounds."""
    out = tmp_path / "buffer.json"
    sizes = ["--tokens", "512", "--producers", "2", "--mb", "0.4", "--groups", "64"]
    command = [sys.executable, str(BENCH / "buffer.py"), *sizes, "--without", "redis", "ray", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(out.read_text())["throughput"]}
    assert {"asyncrl, fsync commit", "asyncrl, fsync interval", "asyncrl, fsync off"} < rows.keys()
    assert all(row["trajectories"] == 64 for row in rows.values())


def test_states_of_the_code_are_measured_in_turns() -> None:
    command = [sys.executable, str(BENCH / "buffer_core.py"), f"a={BENCH.parents[1]}", f"b={BENCH.parents[1]}"]
    sizes = ["--blocks", "2", "--processes", "1"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert lines == [[what, name] for what in ("issue", "put", "out") for name in "ab"]
