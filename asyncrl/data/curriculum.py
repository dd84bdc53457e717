"""Which task comes next. `CURRICULA` names what comes with asyncrl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.data.base import Curriculum, GroupResult
from asyncrl.data.curricula import BySuccess, Levels


class InOrder:
    """Every task once per epoch, in the source's order, whatever is measured."""

    def draw(self, number: int) -> int:
        return number

    def update(self, version: int, results: Sequence[GroupResult]) -> None:
        pass

    def state(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        pass


CURRICULA: dict[str, Callable[..., Curriculum]] = {
    "by_success": BySuccess,
    "in_order": InOrder,
    "levels": Levels,
}
"""A config names one of these, or gives an import path `package.module:Name`. Called with the options, and with `seed`
(`data.seed`) and `train_size` (of the source; None: without end) where it takes them."""
