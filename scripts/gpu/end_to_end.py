"""Part 4: `configs/one-gpu.yaml` from the first process to the audit, with a random model and a reward of any text.

The model is changed by training, the reward rises, engine and learner agree on logprobs, and the audit of the finished
run finds its records without a contradiction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open

from scripts.gpu import models
from scripts.gpu.report import Report, end_of
from scripts.gpu.runs import Changes, configuration, launched, records, series

NAME = "run"
RISE = 0.05
"""Of the mean reward, from the first to the last quarter of the steps."""
AGREE = {"bfloat16": 0.03, "float32": 1e-4}
"""Nats: engine against learner, mean over tokens of staleness 0."""


def run(report: Report, work: Path) -> None:
    dtype = "float32" if report.tiny else "bfloat16"
    shape = models.TINY if report.tiny else models.QWEN3_06B
    models.write(work / "model", shape, dtype=getattr(torch, dtype))
    done: list[bool] = []
    report.section("the run", 120, lambda: done.append(_run(report, work, dtype)))
    if done and done[0]:
        report.section("weights", 5, lambda: _weights(report, work))
        report.section("audit", 10, lambda: _audit(report, work))


def changes(tiny: bool) -> Changes:
    groups, answer, steps, lr = (8, 16, 16, 5e-3) if tiny else (32, 96, 24, 1e-4)
    return {
        "env": {"max_tokens": answer + 64},
        "actors": {"max_new_tokens": answer},
        "learner": {"steps": steps, "groups_per_step": groups, "group_size": 8, "lr": lr},
    }


def _run(report: Report, work: Path, dtype: str) -> bool:
    config = configuration(work, NAME, report.tiny, changes(report.tiny))
    code = launched(report, work, NAME, config)
    steps = [r for r in records(work, NAME) if r["step"] > 0]
    wanted = changes(report.tiny)["learner"]["steps"]
    report.judge("the run ended in order, after steps", str(wanted), len(steps), code == 0 and len(steps) == wanted)
    rewards = series(steps, "reward/mean")
    if len(rewards) >= 8:
        quarter = len(rewards) // 4
        first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
        report.figure("mean reward of the first and of the last quarter of steps", [round(first, 4), round(last, 4)])
        report.at_least("the reward rises by", RISE, last - first)
    agree = series(steps, "correction/engine_mismatch_mean")
    if agree:
        report.at_most("|engine's logprob - learner's|, fresh tokens [nats]", AGREE[dtype], max(agree))
    restarts = max(series(steps, "system/restarts"), default=0.0)
    report.judge("processes restarted", "0", restarts, restarts == 0)
    return code == 0


def _weights(report: Report, work: Path) -> None:
    before = next((work / "model").glob("*.safetensors"))
    [after] = sorted((work / "runs" / NAME / "checkpoints").glob("*/hf/*.safetensors"))[-1:]
    changed, total = 0, 0
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        for name in old.keys():  # noqa: SIM118 - it is no dictionary
            total += 1
            changed += not torch.equal(old.get_tensor(name).float(), new.get_tensor(name).float())
    report.judge("tensors that training changed", f"all of {total}", changed, changed == total)


def _audit(report: Report, work: Path) -> None:
    out = work / "audit.json"
    words = ["audit", str(work / "runs" / NAME), "--format", "json", "--out", str(out)]
    code = report.child([sys.executable, "-m", "asyncrl", *words], work / "audit.log")
    if not out.exists():
        raise RuntimeError(f"the audit ended with {code}:\n{end_of(work / 'audit.log')}")
    verdict = json.loads(out.read_text())
    exact = code == 0 and verdict["holds"]
    report.judge("contradictions that the audit finds", "0", len(verdict["violations"]), exact)
    report.figure("checks of the audit", len(verdict["checks"]))
