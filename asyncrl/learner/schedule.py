"""The learning rate of an optimizer update: a function of its number alone, so that resuming needs no state.

>>> [round(learning_rate(u, 6, peak=1.0, warmup=2, schedule="linear"), 2) for u in range(6)]
[0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
"""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    update: int, total: int, *, peak: float, warmup: int, schedule: Literal["constant", "cosine", "linear"]
) -> float:
    """Of update 0..total-1. Rises to `peak` over `warmup` updates, then stays, or falls so that update `total` is 0."""
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant" or total <= warmup:
        return peak
    done = min((update - warmup) / (total - warmup), 1.0)
    return peak * (1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
