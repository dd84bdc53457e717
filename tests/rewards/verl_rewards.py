"""A reward file as verl's users have them, found by path."""

from __future__ import annotations

import os
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    if solution_str == "raise":
        raise ValueError("no such answer")
    if solution_str == "nan":
        return float("nan")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str}


async def with_options(data_source, solution_str, ground_truth, extra_info, bonus=0.0, **kwargs):
    assert not kwargs, "only what verl passes arrives"
    return (solution_str == ground_truth) + bonus + extra_info.get("k", 0)


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == t) + len(solution_strs) * 10 for s, t in zip(solution_strs, ground_truths, strict=True)]


def length_and_task(data_source, solution_str, ground_truth, extra_info, tokens, task):
    return tokens + task["k"]
