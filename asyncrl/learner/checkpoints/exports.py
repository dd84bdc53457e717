"""Exports of the evaluated weights, of which the best stay (`eval.keep_best`): RUN/exports/step-000010/hf, best.json.

    an evaluation opens ──> its weights are copied, and written in the background
                  it ends ──> the best stay, others are removed

Nothing resumes from an export. The buffer says which weights are the best, and which may become it; an export of these
that is not there is written again by the redo that passes its version. It has the weights that were published, in
`model.dtype`: `asyncrl eval` plays what the run played.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.buffer.client import EvalReply
from asyncrl.errors import RunError
from asyncrl.learner.backends.export import write_weights
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.checkpoints.background import Background
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.model import resolve_path
from asyncrl.run_folder import BEST, export_name, replace

log = logging.getLogger(__name__)

Version = tuple[int, int]
"""(branch, version)"""
_NAME = re.compile(r"step-(\d+)(?:-br(\d+))?")
_UNFINISHED = ".unfinished-"
_COPIED = ("config.json", "generation_config.json")
"""Files of the model that training does not change."""


class Exports:
    """Those of one session."""

    def __init__(
        self, session: Session, backend: Backend, folder: Path, save_tokenizer: Callable[[Path], None]
    ) -> None:
        self._session, self._backend, self._folder, self._save_tokenizer = session, backend, folder, save_tokenizer
        self._writing = Background(session.config.learner.checkpoint_s)
        self._best: tuple[int, int, float] | None = None

    def take(self, reply: EvalReply) -> None:
        """Writes, keeps and removes exports as the buffer's answer says. Raises RunError when the disk is full."""
        if not self._session.config.eval.keep_best:
            return
        wanted = {*map(tuple, reply.undecided), *((reply.best[:2],) if reply.best else ())}
        there = self._there()
        for branch, version in sorted(wanted - there):
            if version == self._session.version:  # on the line of history, so that these are its weights
                self._begin((branch, version))
        if reply.best is not None and reply.best != self._best:
            self._best = reply.best
            replace(self._folder / BEST, json.dumps(self._about(reply.best)) + "\n")
        for gone in there - wanted:
            shutil.rmtree(self._folder / export_name(gone))

    def settle(self) -> None:
        """Waits for the export that is being written: a checkpoint behind it must not be there without it."""
        self._writing.settle()

    def _there(self) -> set[Version]:
        """The exports that are complete, or being written."""
        if not self._writing.busy:
            self.settle()
        found = set()
        for path in self._folder.glob("*step-*"):
            if (match := _NAME.fullmatch(path.name.removeprefix(_UNFINISHED))) is None:
                continue
            if path.name.startswith(_UNFINISHED) and not self._writing.busy:
                shutil.rmtree(path)  # of a learner that has died
            else:
                found.add((int(match[2] or 0), int(match[1])))
        return found

    def _begin(self, of: Version) -> None:
        self.settle()
        session, final = self._session, self._folder / export_name(of)
        unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
        session.ranks.order(Order("publish"))  # which has every rank give its part of the weights
        weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._backend.weights()]

        def write() -> None:
            with _disk_errors(final, unfinished):
                (unfinished / "hf").mkdir(parents=True)
                write_weights(weights, unfinished / "hf")
                model = resolve_path(session.config.model)
                for name in _COPIED:
                    if (model / name).is_file():
                        shutil.copyfile(model / name, unfinished / "hf" / name)
                self._save_tokenizer(unfinished / "hf")
                os.rename(unfinished, final)
            log.info("export %s", final)

        self._folder.mkdir(exist_ok=True)
        with _disk_errors(final, unfinished):
            unfinished.mkdir()
        self._writing.begin(write)

    def _about(self, best: tuple[int, int, float]) -> dict[str, object]:
        branch, version, share = best
        name, keep_best = export_name((branch, version)), self._session.config.eval.keep_best
        return {"export": name, "branch": branch, "version": version, "keep_best": keep_best, "success": share}


@contextmanager
def _disk_errors(final: Path, unfinished: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunError(
            f"the export {final} cannot be written: {error.strerror or error}. Free space there, or leave "
            "eval.keep_best empty; then continue with --resume."
        ) from error
