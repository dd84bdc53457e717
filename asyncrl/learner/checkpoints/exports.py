"""Exports of the evaluated weights, of which the best stay (`eval.keep_best`): RUN/exports/step-000010/hf, best.json.

    an evaluation opens ──> its weights are copied, and written in the background
                  it ends ──> the best stay (best_exports.py), others are removed

Nothing resumes from an export. The buffer gives the results, best first, and says which weights may yet become the
best; an export that is to stay and is not there is written again by the redo that passes its version. It has the
weights that were published, in `model.dtype`: `asyncrl eval` plays what the run played.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.client import EvalReply
from asyncrl.learner.backends.export import write_weights
from asyncrl.learner.backends.protocol import Backend
from asyncrl.learner.checkpoints.background import Background
from asyncrl.learner.checkpoints.best_exports import Version, best, wanted
from asyncrl.learner.checkpoints.disk import disk_errors
from asyncrl.learner.ranks import Order
from asyncrl.learner.session import Session
from asyncrl.model import resolve_path
from asyncrl.run_folder import BEST, export_name, replace

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)(?:-br(\d+))?")
_CHECKPOINT = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"
_REMEDY = "leave eval.keep_best empty"
_COPIED = ("config.json", "generation_config.json")
"""Files of the model that training does not change."""


class Exports:
    """Those of one session."""

    def __init__(
        self, session: Session, backend: Backend, folder: Path, save_tokenizer: Callable[[Path], None]
    ) -> None:
        self._session, self._backend, self._folder, self._save_tokenizer = session, backend, folder, save_tokenizer
        self._writing = Background(session.config.learner.checkpoint_s)
        self._written: Version | None = None
        """What is being written, or was last."""
        self._last: EvalReply | None = None
        self._about = ""
        """What best.json says."""

    def take(self, reply: EvalReply) -> None:
        """Writes, keeps and removes exports as the buffer's answer says. Raises RunError when the disk is full."""
        if not self._session.config.eval.keep_best:
            return
        self._last, version = reply, self._session.version
        there, writing = self._there()
        # Those of the present version can be written: what the buffer names is on the line of history.
        can_be = {*there, *writing, *(of for of in _named(reply) if of[1] == version)}
        stay = {*reply.undecided, *wanted(reply.results, can_be, [*self._points(), version])}
        for of in sorted(stay & can_be - there - writing):
            self._begin(of)
        self._name_best(reply, there)
        for gone in there - stay:
            self._remove(self._folder / export_name(gone))

    def settle(self) -> None:
        """Waits for the export that is being written: a checkpoint behind it must not be there without it."""
        self._writing.settle()

    def close(self) -> None:
        """The same at the end, and does what the last answer says about the export that was being written."""
        self.settle()
        if self._last is not None:
            self.take(self._last)
            self.settle()

    def _points(self) -> list[int]:
        """Versions of the checkpoints, also of one that is being written: at each of them a branch may begin."""
        folder = self._folder.with_name("checkpoints")
        return [int(match[1]) for path in folder.glob("*step-*") if (match := _CHECKPOINT.search(path.name))]

    def _there(self) -> tuple[set[Version], set[Version]]:
        """The exports that are complete; and the one that is being written, if any."""
        busy = self._writing.busy
        if not busy:
            self.settle()
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path)  # of a learner that has died
        complete = {
            (int(match[2] or 0), int(match[1]))
            for path in self._folder.glob("step-*")
            if (match := _NAME.fullmatch(path.name))
        }
        return complete, {self._written} - complete if busy and self._written else set()

    def _remove(self, folder: Path) -> None:
        """What is left of it where the learner dies is no export."""
        unfinished = folder.with_name(f"{_UNFINISHED}{folder.name}")
        os.rename(folder, unfinished)
        shutil.rmtree(unfinished)

    def _begin(self, of: Version) -> None:
        self.settle()
        session, final = self._session, self._folder / export_name(of)
        unfinished = final.with_name(f"{_UNFINISHED}{final.name}")
        session.ranks.order(Order("publish"))  # which has every rank give its part of the weights
        weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._backend.weights()]

        def write() -> None:
            with disk_errors(f"the export {final}", unfinished, _REMEDY):
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
        with disk_errors(f"the export {final}", unfinished, _REMEDY):
            unfinished.mkdir()
        self._written = of
        self._writing.begin(write)

    def _name_best(self, reply: EvalReply, there: set[Version]) -> None:
        """Has best.json name the best export that is there, and the better weights that have none."""
        file, found = self._folder / BEST, best(reply.results, there)
        if found is None:
            file.unlink(missing_ok=True)
            self._about = ""
            return
        branch, version, share = found
        about: dict[str, object] = {"export": export_name((branch, version)), "branch": branch, "version": version}
        about |= {"keep_best": self._session.config.eval.keep_best, "success": share}
        if (top := reply.results[0]) != found:
            about["without_export"] = {"branch": top[0], "version": top[1], "success": top[2]}
        if (text := json.dumps(about) + "\n") != self._about:
            replace(file, text)
            self._about = text


def _named(reply: EvalReply) -> set[Version]:
    return {*reply.undecided, *((branch, version) for branch, version, _ in reply.results)}
