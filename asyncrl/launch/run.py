"""Runs from Python: `train` starts one, `open_run` finds one; `Run` is the handle of either, by its folder.

    train ── starts ──> asyncrl.launch.child: the launcher, in a process and a session of its own
      │                    │ checks passed: the run folder; else the error, raised here
      └──> Run <───────────┘ status, metrics, summary: read from the folder; stop: SIGTERM to the launcher

The caller's process gets no signal handlers, threads or event loops. It holds a pipe that ends the run with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from asyncrl.buffer.record import from_record
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError, RunError
from asyncrl.launch.diagnosis.status import status
from asyncrl.launch.processes import alive, python
from asyncrl.process.logs import CONFIG_ERROR
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts import held_out, store
from asyncrl.tracking.rollouts.held_out import Answer
from asyncrl.tracking.rollouts.sample import Rollout
from asyncrl.tracking.rollouts.text import TokenText, model_text
from asyncrl.tracking.sinks import jsonl
from asyncrl.wire import WireError

POLL_S = 0.1
DETACHED = -1
QUIET = "--quiet"
LOG = "launcher"
"""Name of the log that a quiet launcher writes in place of the terminal."""


def train(config: Config, *, wait: bool = True, detach: bool = False) -> Run:
    """Trains as `asyncrl launch` does, in processes of its own.

    Args:
        wait: return when the run has ended, and show it on the terminal meanwhile. Otherwise return once the checks
            have passed; the launcher then writes its output to logs/launcher.log.
        detach: the run survives this process. Otherwise it is stopped in order when this process ends, by any cause.

    Raises ConfigError and RunError with the command line's sentence: when the run cannot begin, and, with `wait`, when
    it fails. Ctrl-C while waiting stops the run in order, unless it is detached.
    """
    run = _start(config, quiet=detach or not wait, detach=detach)
    if wait:
        try:
            run.wait()
        except KeyboardInterrupt:
            if not detach:
                run.stop()
            raise
    return run


def open_run(path: str | Path) -> Run:
    """The run in a folder, live or over. Raises RunError when the folder holds none."""
    return Run(RunFolder.existing(Path(path)))


class Run:
    """A run by its folder. A handle that `open_run` gives does not end the run with the caller."""

    def __init__(
        self, folder: RunFolder, launcher: subprocess.Popen[bytes] | None = None, lifeline: int | None = None
    ) -> None:
        """`lifeline`: the writing end of the launcher's pipe, open as long as both the run and this process live."""
        self._folder, self._launcher, self._lifeline = folder, launcher, lifeline
        self._text: TokenText | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def alive(self) -> bool:
        """Whether its launcher runs, on this host."""
        if self._launcher is not None:
            return self._launcher.poll() is None
        launcher = self._folder.record()["processes"].get("launcher")
        return launcher is not None and self._folder.copied_from is None and alive(*launcher)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json. Raises RunError while the run is live, and when it left none."""
        if self.alive:
            raise RunError(f"{self.path} is live: its summary is written at its end. Call wait() first.")
        file = self._folder.summary
        # A resumed run still has the summary of its former launch.
        if not file.is_file() or file.stat().st_mtime < self._folder.record()["started"]:
            raise RunError(
                f"{self.path} has no summary: its launcher was killed, or failed as its output says (the terminal, or "
                f"logs/{LOG}.log). asyncrl launch --resume {shlex.quote(str(self.path))} continues from the last "
                "checkpoint."
            )
        summary: dict[str, Any] = json.loads(file.read_text())
        return summary

    def status(self) -> dict[str, Any]:
        """The processes; the buffer's status while it lives, else the summary. Raises RunError."""
        return status(self._folder)

    def metrics(self) -> dict[str, npt.NDArray[np.float64]]:
        """The recorded series as columns, of one value per recorded step; nan where a series has none. The column
        `step` holds the training steps."""
        records = jsonl.by_step(self._folder.metrics)
        names = sorted({name for record in records for name in record})
        return {name: np.array([record.get(name, np.nan) for record in records], np.float64) for name in names}

    def rollouts(self) -> Iterator[Rollout]:
        """The sampled trajectories (`tracking.rollouts`), in the order of the batches: their text and, per token, the
        version, the logprobs, the importance weight, the advantage and the loss mask. Raises RunError for a damaged
        file, and for one that a newer asyncrl wrote."""
        return store.read_all(self._folder.rollouts)

    def held_out(self) -> Iterator[Answer]:
        """The kept answers of held-out tasks (`tracking.held_out`), evaluation by evaluation; `text_of` gives their
        text. Raises RunError for a damaged file."""
        return held_out.read_all(self._folder.held_out)

    def text_of(self, answer: Answer) -> str:
        """The text of all rows of an answer. Raises ConfigError without the run's tokenizer, RunError for a damaged
        answer."""
        if self._text is None:
            self._text = model_text(self._folder.load_config().model)
        try:
            rows = from_record(answer.payload).rows
        except (ValueError, WireError) as error:
            raise RunError(f"the answer to {answer.task_id} at version {answer.due} is damaged: {error}") from error
        return "\n".join(self._text.split(row.token_ids.tolist())[0] for row in rows)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Returns the summary once every process of the run has ended. Raises TimeoutError; raises ConfigError or
        RunError, with the reason, when the run failed."""
        self._wait(timeout_s)
        summary = self.summary
        if summary["outcome"] == "failed":
            raise _error(summary["exit_code"], summary["why"])
        return summary

    def stop(self, timeout_s: float | None = None) -> None:
        """Stops the run in order, as Ctrl-C does: the learner writes its checkpoint. Returns when every process has
        ended; at once when the run is over. Raises TimeoutError. A Ctrl-C meanwhile kills the run."""
        self._terminate()
        try:
            self._wait(timeout_s)
        except KeyboardInterrupt:
            self._terminate()
            self._wait(None)
            raise

    def _wait(self, timeout_s: float | None) -> None:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} has not ended within {timeout_s:g} s.")
            time.sleep(POLL_S)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _terminate(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._folder.record()["processes"]["launcher"][0]), signal.SIGTERM)


def _start(config: Config, *, quiet: bool, detach: bool) -> Run:
    """Starts the launcher and returns once the run has begun. Raises ConfigError and RunError."""
    (report, reporting), (reading, lifeline) = os.pipe(), os.pipe()
    ends = (str(reporting), str(DETACHED if detach else reading))
    launcher = subprocess.Popen(
        python("asyncrl.launch.child", *ends, *([QUIET] if quiet else [])),
        stdin=subprocess.PIPE,
        pass_fds=[reporting, reading],
        start_new_session=True,
    )
    os.close(reporting)
    os.close(reading)
    message: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], launcher.stdin) as stdin:
            stdin.write(json.dumps(config.model_dump(mode="json")).encode())
        with os.fdopen(report) as lines:
            message = json.loads(lines.readline() or "{}")
    finally:
        if detach or "run" not in message:
            os.close(lifeline)
        if "run" not in message:  # also after Ctrl-C: nothing must start that the caller has no handle of
            launcher.terminate()
            code = launcher.wait()
    if "run" not in message:
        why = message.get("error", f"the launcher ended with exit code {code} before the run began; see its output.")
        raise _error(message.get("exit_code", 1), why)
    return Run(RunFolder(Path(message["run"])), launcher, None if detach else lifeline)


def _error(exit_code: int, why: str) -> AsyncRLError:
    return ConfigError(why) if exit_code == CONFIG_ERROR else RunError(why)
