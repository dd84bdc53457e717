"""Where an incarnation of the learner begins: a checkpoint that the ledger's history knows, or the initial model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import BufferRefused, Start
from asyncrl.config.learner import LearnerConfig
from asyncrl.learner.checkpoints import State, complete, read_list

log = logging.getLogger(__name__)

Ask = Callable[[int, int, int | None, bool], Start]
"""(batch, version, branch, fresh) as `BufferClient.start` takes them; raises BufferRefused"""


def begin(checkpoints: Path, ask: Ask, *, resume: bool, fresh: Path | None) -> tuple[Path | None, Start]:
    """The checkpoint (None: the initial model), and what the buffer said to it.

    `resume`: the newest that is a point of the ledger's history; those of a line that was left are passed over.
    `fresh`: this one, and a new branch begins there. Raises BufferRefused when the buffer knows none of them.
    """
    if fresh is not None:
        state = read_list(fresh)[0]
        return fresh, ask(state.batch, state.version, state.branch, True)
    newest_first = complete(checkpoints)[::-1] if resume else []
    for path in newest_first:
        state = read_list(path)[0]
        try:
            return path, ask(state.batch, state.version, state.branch, False)
        except BufferRefused as error:
            if error.code != "unknown_checkpoint" or path == newest_first[-1]:
                raise
            log.warning("%s is passed over: %s", path, error)
    return None, ask(0, 0, None, False)


def warn_of_other_rounding(state: State, learner: LearnerConfig) -> None:
    for name in ("threads", "ranks"):
        now, was = getattr(learner, name), getattr(state, name)
        if now != was:
            log.warning("learner.%s is %d and was %d: redone steps may differ in the last bits", name, now, was)
