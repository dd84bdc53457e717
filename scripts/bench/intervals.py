"""Intervals over the seeds of a benchmark (Student's t)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5%, by the number of seeds."""


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95% interval over the seeds (Student's t), within [0, 1]; of one seed nothing is known."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, 0.0, 1.0
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, max(0.0, mean - half), min(1.0, mean + half)
