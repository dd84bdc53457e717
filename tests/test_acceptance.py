"""scripts/gpu/accept.py with tiny shapes on a CPU: every part runs to its end, and claims nothing of a GPU."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu" / "accept.py"
NAMES = ("needed", "kernels", "engine", "sharing", "end-to-end")
Rows = dict[str, dict[str, Any]]


def accept(part: int, work: Path) -> Rows:
    """The rows of a part's results, by what they are about."""
    command = [sys.executable, str(SCRIPT), "--part", str(part), "--tiny", "--work", str(work)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=work
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((work / f"gpu-{NAMES[part]}.json").read_text())
    assert not (work / f"gpu-{NAMES[part]}.part.json").exists()
    assert {"torch", "transformers"} <= found["versions"].keys()
    for row in found["rows"]:
        assert row["verdict"].startswith("not run"), row
        assert row["what"] in done.stdout
    return {row["what"]: row for row in found["rows"]}


def held(rows: Rows, *but: str) -> None:
    """Every goal that a CPU can be held to, which is none of speed."""
    missed = [what for what, row in rows.items() if row["holds"] is False and not any(part in what for part in but)]
    assert not missed, [rows[what] for what in missed]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_modules_of_every_process_and_what_to_bring_along(tmp_path: Path) -> None:
    rows = accept(0, tmp_path)
    assert rows["modules of the learner"]["measured"] == "imported"
    held(rows, "packages to bring along")
    assert set(rows["packages to bring along"]["measured"]) <= {"vllm"} or rows["packages to bring along"]["holds"]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_attention_and_learner(tmp_path: Path) -> None:
    rows = accept(1, tmp_path)
    held(rows, "lengths never seen", "ragged rows over")
    for name in ("4k", "16k", "64k", "ragged"):
        assert rows[f"learner, {name} [tokens/s]"]["measured"] > 0
        assert rows[f"learner, {name}: peak over computed"]["holds"]
    assert "attention, ragged rows with shared prefixes, bfloat16: gradients" in rows
    assert "|logprob of fsdp2 - of torch|, mean [nats]" in rows


@pytest.mark.system
@pytest.mark.timeout(600)
def test_engine_with_new_weights_in_flight(tmp_path: Path) -> None:
    rows = accept(2, tmp_path)
    held(rows)
    assert rows["logprobs in flight, of the own version: |difference| [nats]"]["holds"]
    assert 0 < rows["share of tokens in flight that the new version sampled"]["measured"] < 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_gpu_for_both(tmp_path: Path) -> None:
    rows = accept(3, tmp_path)
    held(rows, "asynchronous over synchronous", "stands still")
    assert rows["asynchronous over synchronous [trained tokens/s]"]["measured"] > 0


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_run_to_its_audit(tmp_path: Path) -> None:
    rows = accept(4, tmp_path)
    held(rows)
    assert rows["the reward rises by"]["measured"] > 0.05
    assert rows["contradictions that the audit finds"]["measured"] == 0


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    monkeypatch.syspath_prepend(str(ROOT))


def test_without_a_gpu_a_part_says_that_it_was_not_run(parts: None, tmp_path: Path) -> None:
    from scripts.gpu.report import Report

    report = Report("x", tmp_path, tiny=True)
    report.at_least("rate", 5.0, 6.0, "tokens/s")
    report.at_most("error", 1.0, float("nan"))
    assert [row["verdict"] for row in report.rows] == ["not run on a GPU"] * 2
    assert [row["holds"] for row in report.rows] == [True, False], "NaN passes no goal"
    assert report.finish()


def test_on_a_gpu_a_missed_goal_and_a_failure_refuse(parts: None, tmp_path: Path) -> None:
    from scripts.gpu.report import Report

    report = Report("x", tmp_path, tiny=True)
    report.on_gpu = True
    report.at_least("rate", 5.0, 6.0)
    assert report.rows[-1]["verdict"] == "met"
    report.at_least("rate", 5.0, 4.0)
    assert report.rows[-1]["verdict"] == "missed"

    def broken() -> None:
        raise ValueError("no such kernel")

    report.section("attention", 1.0, broken)
    assert report.rows[-1]["verdict"] == "failed"
    assert "no such kernel" in report.rows[-1]["measured"]
    part = json.loads((tmp_path / "gpu-x.part.json").read_text())
    assert [row["verdict"] for row in part["rows"]] == ["met", "missed", "failed"], "written as they come"
    assert not report.finish()


def test_a_process_that_does_not_end_is_ended_with_what_it_started(parts: None, tmp_path: Path) -> None:
    import psutil

    from scripts.gpu.report import Report

    report = Report("x", tmp_path, tiny=True)
    before = set(psutil.Process().children(recursive=True))
    assert report.child(["sh", "-c", "sleep 60 & sleep 60"], tmp_path / "log", limit_s=0.3) is None
    assert not set(psutil.Process().children(recursive=True)) - before
    assert report.child(["sh", "-c", "echo said; exit 3"], tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "said\n"
    report.finish()


def test_the_examples(parts: None) -> None:
    from scripts.gpu import needed, task

    assert doctest.testmod(needed).failed == 0
    assert doctest.testmod(task).failed == 0


def test_the_reference_of_attention_is_a_plain_softmax_over_each_row(parts: None) -> None:
    """Against transformers' way: every row alone, with torch's own causal attention."""
    import torch

    from scripts.gpu import learner_attention

    made = learner_attention.case([9, 14, 6], 0, (4, 2, 8), "cpu", torch.float32)
    got = learner_attention.reference(made)
    at = 0
    for s in made.plan.segments:
        q, k, v = (x[:, :, s.start : s.start + s.length] for x in (made.query, made.key, made.value))
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert torch.allclose(got[:, s.start : s.start + s.length], alone.transpose(1, 2), atol=1e-6)
        at += s.length
    assert at == 29
    shared = learner_attention.case([20, 20], 12, (4, 2, 8), "cpu", torch.float32)
    assert any(s.prefix for s in shared.plan.segments)
    out, gradient = learner_attention.errors(shared)
    assert max(out, gradient) < 1e-5
