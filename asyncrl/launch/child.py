"""The launcher as a child process of `asyncrl.train`: `python -m asyncrl.launch.child REPORT LIFELINE`.

caller ── config, JSON ──> stdin: prepare, launch
caller <── REPORT: {"run": folder} once the run has begun, else {"error": sentence, "exit_code": code}
caller ── LIFELINE: its end of file stops the run in order; DETACHED: the run survives the caller
"""

from __future__ import annotations

import json
import os
import signal
import sys

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, described
from asyncrl.launch.api import check_and_launch
from asyncrl.launch.run import DETACHED, LOG, QUIET
from asyncrl.process import lifeline
from asyncrl.run_folder import RunFolder


def main(report: int, life: int, *, quiet: bool) -> int:
    """Gives the exit code."""
    os.set_inheritable(report, False)
    if life != DETACHED:
        lifeline.at_end(life, lambda: os.kill(os.getpid(), signal.SIGTERM))

    begun = False

    def opened(run: RunFolder) -> None:
        nonlocal begun
        begun = True
        if quiet:
            sys.stdout.flush()
            log = os.open(run.log(LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        _report(report, {"run": str(run.path)})

    try:
        outcome = check_and_launch(Config.model_validate(json.load(sys.stdin)), opened=opened)
    except (AsyncRLError, OSError) as error:
        code, sentence = described(error)
        if begun:
            print(f"asyncrl: {sentence}", file=sys.stderr)
        else:
            _report(report, {"error": sentence, "exit_code": code})
        return code
    return outcome.exit_code


def _report(report: int, message: dict[str, object]) -> None:
    """Does nothing when the caller is gone."""
    try:
        os.write(report, json.dumps(message).encode() + b"\n")
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), quiet=QUIET in sys.argv))
