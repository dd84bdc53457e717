"""Groups that are never trained on. `FILTERS` names them; `buffer.filters` takes import paths too.

A filter gets a complete group and says True to drop it. It sees raw rewards and sizes, not the arrays.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.buffer.ledger.group import Group

Filter = Callable[[Group], bool]


def zero_variance(group: Group) -> bool:
    """All rewards equal: every group-relative advantage is zero."""
    return len(set(group.rewards)) == 1


def too_long(group: Group) -> bool:
    """An episode ran into a limit on tokens, so its reward says little about what it would have done."""
    return any(r.stop_reason in ("max_tokens", "length") for r in group.trajectories)


FILTERS: dict[str, Filter] = {"zero_variance": zero_variance, "too_long": too_long}
