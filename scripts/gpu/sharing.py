"""Part 3: learner and engine on one GPU, which exchange weights through its memory.

    synchronous     `max_staleness: 0`: they take turns
    asynchronous    `max_staleness: 2`: weights are published by `cuda_ipc` while both work

The learning rate is 0, so that both see the same lengths: about geometric, because some tokens of the vocabulary end an
answer, and cut. A run that is not through when its share of the part's time is over is ended, and counts with the steps
that it made.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from scripts.gpu import models
from scripts.gpu.report import Report
from scripts.gpu.runs import Changes, Records, configuration, launched, records, series

GROUP = 8
RATIO, STANDSTILL = 1.35, 0.05


def run(report: Report, work: Path) -> None:
    shape = models.TINY if report.tiny else models.QWEN3_06B
    dtype = torch.float32 if report.tiny else torch.bfloat16
    models.write(work / "model", shape, dtype=dtype)
    rates: dict[str, float] = {}
    for name, staleness, share in (("synchronous", 0, 0.56), ("asynchronous", 2, 0.95)):
        report.section(
            name, 60, lambda n=name, s=staleness, p=share: _one(report, work, shape, n, s, p * report.left(), rates)
        )
    if len(rates) == 2:
        report.at_least(
            "asynchronous over synchronous [trained tokens/s]", RATIO, rates["asynchronous"] / rates["synchronous"]
        )


def _one(
    report: Report, work: Path, shape: models.Shape, name: str, staleness: int, limit_s: float, rates: dict[str, float]
) -> None:
    config = configuration(work, name, report.tiny, changes(report.tiny, shape, staleness))
    code = launched(report, work, name, config, limit_s=limit_s)
    found = records(work, name)
    shutil.rmtree(work / "runs" / name / "checkpoints", ignore_errors=True)  # gigabytes
    settle, fewest = (1, 2) if report.tiny else (3, 4)
    measured = [r for r in found if r["step"] >= settle]
    if len(measured) < fewest:
        raise RuntimeError(f"{name}: {len(found)} training steps in {limit_s:.0f} s are too few to measure")
    rates[name] = tokens_per_s(measured)
    report.figure(f"{name}: steps measured, of a run that {'ended' if code == 0 else 'was cut off'}", len(measured) - 1)
    report.figure(f"{name} [trained tokens/s]", rates[name])
    report.figure(f"{name}: seconds a step", _mean(series(measured, "throughput/step_s")))
    report.figure(f"{name}: seconds to publish a version", _mean(series(measured, "weights/publish_s")))
    report.figure(f"{name}: seconds to load a version", _mean(series(measured, "weights/load_s")))
    if staleness:
        still = _mean(series(measured, "weights/paused_share"))
        report.at_most("generation stands still for weights, at one publication a step", STANDSTILL, still)
        stale = max(series(measured, "staleness/max"), default=0.0)
        report.judge("asynchronous: greatest staleness", f"at most {staleness}", stale, stale <= staleness)


def changes(tiny: bool, shape: models.Shape, staleness: int) -> Changes:
    groups, longest, mean, steps = (2, 24, 12, 5) if tiny else (16, 512, 150, 40)
    first = models.FIRST + 3
    stops = list(range(first, first + max(1, shape["vocab_size"] // mean)))
    slots: dict[str, Any] = {} if tiny else {"slots": min(256, GROUP * groups * (staleness + 1))}
    return {
        "env": {"max_tokens": longest + 64},
        "actors": {"max_new_tokens": longest, "stop_token_ids": stops, **slots},
        "buffer": {"max_staleness": staleness},
        "learner": {"steps": steps, "groups_per_step": groups, "group_size": GROUP, "lr": 0.0},
        "launch": {"memory_check": "off"},
    }


def tokens_per_s(of: Records) -> float:
    """Between the first and the last record."""
    return float(of[-1]["tokens"] - of[0]["tokens"]) / (of[-1]["wall_s"] - of[0]["wall_s"])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
