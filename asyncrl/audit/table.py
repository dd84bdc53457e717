"""Tables of checks: a check is a function of the evidence that yields a sentence for each contradiction it finds.

The first line of its docstring says what must hold; `asyncrl audit --format json` lists these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Check = Callable[..., Iterator[str]]


def apply(checks: Iterable[Check], *evidence: Any) -> Iterator[str]:
    """The sentences of all `checks`."""
    for check in checks:
        yield from check(*evidence)


def described(checks: Iterable[Check]) -> list[str]:
    """What must hold, one sentence for each check."""
    return [(check.__doc__ or "").strip().splitlines()[0] for check in checks]
