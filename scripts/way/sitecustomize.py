"""Records which files of asyncrl run, in every Python process that finds this file on its path (scripts/way/count.py).

A file is noted once, as soon as one of its functions is called while the file `$ASYNCRL_WAY/now` exists: start-up is
not part of the way of a trajectory.
"""

import os
import sys
import threading

FOLDER = os.environ.get("ASYNCRL_WAY", "")
NEEDLE = f"{os.sep}asyncrl{os.sep}"


def _watch() -> None:
    noted: set[str] = set()
    now = os.path.join(FOLDER, "now")
    sink = os.open(os.path.join(FOLDER, f"{os.getpid()}.txt"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    command = " ".join(sys.orig_argv)
    calls = 0
    begun = False

    def profile(frame, event, arg):  # type: ignore[no-untyped-def]
        nonlocal begun, calls
        if event != "call":
            return
        if not begun:
            calls += 1
            if calls % 1000 or not os.path.exists(now):
                return
            begun = True
            os.write(sink, f"# {command}\n".encode())
        name = frame.f_code.co_filename
        if name not in noted and frame.f_code.co_name != "<module>":
            noted.add(name)
            if NEEDLE in name:
                os.write(sink, f"{name}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


if FOLDER:
    _watch()
