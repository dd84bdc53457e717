"""The score of the tasks of `data.source: reasoning_gym`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from asyncrl.data.sources.reasoning_gym import opened


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """0 to 1: what the dataset's own scorer gives the text between the last <answer> and </answer>, or all of it.

    Metrics: `success` (1 is full marks), `answered` (the tags were there).
    """
    dataset = opened(extra_info["dataset"], extra_info["config"])
    matches = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    answer = (matches[-1] if matches else solution_str).strip()
    score = float(dataset.score_answer(answer, dataset[extra_info["index"]]))
    return {"score": score, "success": float(score >= 1), "answered": float(bool(matches))}
