"""A fake role: reports that it is ready, has a grandchild, and ends as its argument says.

    python fake_role.py RUN NAME BEHAVIOUR LAUNCHER

LAUNCHER is the socket of the launcher: tests start hundreds of these, and reading the configuration takes longer than
all else that they import.

stay: until SIGTERM, then exit 0.   deaf: notes SIGTERM in RUN/asked, and stays.
done: exit 0 when the file RUN/done is there.   saves: as `done`; at SIGTERM it ends as the learner does.
die: exit 1 after a logged error.   config: exit 2.   fatal: exit 3.   mute: never ready.
once: die at the first start, then as `done`.   daemon: as `stay`, and leaves a daemon with an empty environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from asyncrl.errors import ConfigError, RunError
from asyncrl.process.logs import STOPPED
from asyncrl.process.role import play
from asyncrl.sockets import Endpoint
from asyncrl.tracking.reporter import Reporter

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
DAEMON = f"""
import subprocess
daemon = subprocess.Popen({SLEEP!r}, env={{}}, start_new_session=True, stdout=subprocess.DEVNULL)
print(daemon.pid)
"""


def main() -> None:
    run, name, behaviour = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    note = run / f"{name}.pids"
    first, asked = not note.exists(), list[bool]()
    grandchild = subprocess.Popen(SLEEP)
    pids = [os.getpid(), grandchild.pid]
    if behaviour == "daemon":
        pids.append(int(subprocess.check_output([sys.executable, "-c", DAEMON])))
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: (run / "asked").touch())
    else:
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    with note.open("a") as file:  # once it is noted, it takes signals
        file.write("".join(f"{pid}\n" for pid in pids))
    if behaviour == "config":
        raise ConfigError("learner.loss is 'x': expected y.")
    if behaviour == "fatal":
        raise RunError("the disk is full.")
    if behaviour == "die" or (behaviour == "once" and first):
        raise ValueError("no such weather")
    if behaviour != "mute":
        Reporter(Endpoint("launcher", f"ipc://{sys.argv[4]}"), name).ready()
    deadline = time.monotonic() + 110
    while time.monotonic() < deadline:
        if behaviour in ("done", "once", "saves") and (run / "done").exists():
            return
        if asked:
            with (run / "stopped").open("a") as file:
                file.write(f"{name}\n")
            sys.exit(STOPPED if behaviour == "saves" else 0)
        time.sleep(0.02)


if __name__ == "__main__":
    play(sys.argv[2], main)
