"""What a handler gives back: a reply, and the frames that travel with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncrl.wire import Frame


class Answer(NamedTuple):
    reply: Any = None
    frames: Sequence[Frame] = ()
