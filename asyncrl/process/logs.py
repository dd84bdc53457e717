"""Logging of all processes: plain lines on stderr, which the launcher redirects to `logs/<role>.log`."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
from pathlib import Path

from asyncrl import redaction

CONFIG_ERROR = 2
"""Exit code of a role: the configuration cannot work. The run ends, exit code 2."""
RUN_ERROR = 3
"""Exit code of a role: the run cannot continue and a restart would not help. The run ends, exit code 1."""
STOPPED = 4
"""Exit code of the learner: it was told to stop before the run was over. Unless the launcher stops too, it is started
again, from the checkpoint that it has just written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (?P<level>[A-Z]+) [\w.\-]+: (?P<message>.*)$")
_TAIL_BYTES = 16384
STACKS = signal.SIGUSR2
"""Signal that makes a role write the stacks of its threads into its log."""


def setup(role: str) -> logging.Logger:
    """Logs to stderr, at the level ASYNCRL_LOG, without secrets; crashes in C code leave a traceback there too."""
    redaction.hide()
    redaction.redact_tracebacks()
    level = os.environ.get("ASYNCRL_LOG", "INFO").upper()
    logging.basicConfig(stream=sys.stderr, level=level, format=FORMAT, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Redacting(FORMAT))
    logging.captureWarnings(True)
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    return logging.getLogger(role)


class _Redacting(logging.Formatter):
    """Formats a line without the secrets of this process."""

    def format(self, record: logging.LogRecord) -> str:
        return redaction.redact(super().format(record))


def tail(log: Path, lines: int = 20) -> list[str]:
    """The last lines of a log, without empty ones."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def why_it_ended(log: Path, code: int) -> str:
    """How a process ended, in one phrase, with its last error.

    `code` is subprocess's return code: negative for a signal.
    """
    error = last_error(log)
    if error and code in (CONFIG_ERROR, RUN_ERROR):
        return error
    if code == STOPPED:
        return "told to stop, and not by the launcher"
    ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{ending}: {error}" if error else ending


def last_error(log: Path) -> str:
    """The last error logged, or the last line of a traceback."""
    lines = tail(log)
    for line in reversed(lines):
        if not (match := _LINE.match(line)):
            # The last line of a traceback is its exception.
            if re.match(r"^[\w.]+(Error|Exception|Interrupt|Exit|Timeout)\b", line):
                return line
        elif match["level"] in ("ERROR", "CRITICAL"):
            return match["message"]
    return ""
