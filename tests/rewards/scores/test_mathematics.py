"""`math`: an answer that takes too long is a wrong one; a worker that takes too long is an outage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards.isolation import processes
from asyncrl.rewards.scores.mathematics import Math

FAKE = """
import time
time.sleep({import_s})

def parse(text, parsing_timeout):
    time.sleep(60 if "hard" in text else 0)
    return [text.split("{{")[-1].rstrip("}}")]

def verify(truth, answer, timeout_seconds):
    return truth == answer
"""


@pytest.fixture
def math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a fake package, whose import takes so many seconds, where the workers find it first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda import_s: (tmp_path / "math_verify.py").write_text(FAKE.format(import_s=import_s))


def test_a_slow_import_is_no_wrong_answer(math_verify: Any) -> None:
    """Before, it counted as time of the first call, whose worker was killed, and of each call after that."""
    math_verify(3)
    math = Math(timeout_s=1.5, processes=1)
    for answer, score in (("4", 1.0), ("5", 0.0)):
        assert asyncio.run(math("", f"\\boxed{{{answer}}}", "4")) == {"score": score, "answered": 1.0}


def test_an_answer_that_takes_too_long_is_a_wrong_one(math_verify: Any) -> None:
    math_verify(0)
    math = Math(timeout_s=0.5, processes=1)
    assert asyncio.run(math("", r"\boxed{hard}", "4")) == {"score": 0.0, "answered": 1.0, "timed_out": 1.0}
    assert asyncio.run(math("", r"\boxed{4}", "4"))["score"] == 1.0


def test_a_worker_that_does_not_start_in_time_is_an_outage(math_verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START_S", 0.5)
    math_verify(60)
    with pytest.raises(RuntimeError, match=r"score equal: its process was not ready within 0\.5 s and was killed"):
        asyncio.run(Math(timeout_s=30.0, processes=1)("", r"\boxed{4}", "4"))


def test_a_package_that_cannot_be_imported_is_an_outage_until_it_can(math_verify: Any, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    math = Math(timeout_s=30.0, processes=1)
    with pytest.raises(RuntimeError, match="score equal: ImportError: half installed"):
        asyncio.run(math("", r"\boxed{4}", "4"))
    math_verify(0)
    assert asyncio.run(math("", r"\boxed{4}", "4"))["score"] == 1.0
