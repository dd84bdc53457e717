"""Chooses where an incarnation of the learner begins: at a checkpoint of the ledger's history, or the initial model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import BufferRefused, Start
from asyncrl.learner.checkpoints.checkpoints import complete, read_list
from asyncrl.learner.checkpoints.saving import Saving
from asyncrl.learner.publication import Publication
from asyncrl.learner.session import Session

log = logging.getLogger(__name__)

Ask = Callable[[int, int, int | None, bool], Start]
"""(batch, version, branch, fresh) as `BufferClient.start` takes them; raises BufferRefused"""


def start(
    session: Session,
    saving: Saving,
    publication: Publication,
    *,
    resume: bool,
    branch_from: Path | None,
    on_branch: Callable[[], None],
) -> None:
    """Agrees with the buffer where this incarnation begins, and loads what is needed for it. `on_branch` is called once
    the new branch at `branch_from` is recorded."""
    session.reporter.waiting("buffer", "buffer")
    session.ask(lambda: session.buffer.hello("learner"))
    checkpoint, at = agree_on_start(
        saving.folder,
        lambda *point: session.ask(lambda: session.buffer.start(*point)),
        resume=resume,
        branch_from=branch_from,
    )
    if branch_from is not None:
        on_branch()
    session.incarnation, session.branch = at.incarnation, at.branch
    if at.why:
        log.warning("a new branch, %d, begins at version %d: %s", at.branch, at.version, at.why)
        session.reporter.event("branch", step=at.version, branch=at.branch, why=at.why)
    publication.published = at.published
    session.reporter.waiting(None)
    if checkpoint is not None:
        saving.load(checkpoint)
        session.reporter.event("resumed", step=session.version, checkpoint=str(checkpoint))
    origin = checkpoint or f"the model at model.path ({session.config.model.path})"
    point = (session.incarnation, session.version, session.batch)
    log.info("incarnation %d at version %d, batch %d, from %s", *point, origin)


def agree_on_start(checkpoints: Path, ask: Ask, *, resume: bool, branch_from: Path | None) -> tuple[Path | None, Start]:
    """The checkpoint (None: the initial model), and the buffer's answer to it.

    `resume`: the newest checkpoint that is a point of the ledger's history; those of an abandoned branch are passed
    over. `branch_from`: this checkpoint, at which a new branch begins. Raises BufferRefused if none is in the history.
    """
    if branch_from is not None:
        state = read_list(branch_from)[0]
        return branch_from, ask(state.batch, state.version, state.branch, True)
    newest_first = complete(checkpoints)[::-1] if resume else []
    for path in newest_first:
        state = read_list(path)[0]
        try:
            return path, ask(state.batch, state.version, state.branch, False)
        except BufferRefused as error:
            # With no known checkpoint the error: the initial model would silently lose what was learned.
            if error.code != "unknown_checkpoint" or path == newest_first[-1]:
                raise
            log.warning("%s is passed over: %s", path, error)
    return None, ask(0, 0, None, False)
