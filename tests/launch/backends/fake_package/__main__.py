"""Writes what it is into a file, then ends with the code that it is told, or waits: `FILE CODE`, `FILE stay`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from numpy import random

from asyncrl.process import lifeline

if __name__ == "__main__":
    lifeline.bind_to_launcher()
    said = {
        "parent": os.getppid(), "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "words": sys.argv[2:],
        "mine": os.environ.get("MINE"), "lifeline": lifeline.ENVIRONMENT in os.environ,
        "drawn": float(random.random()), "forked": "preloading" in Path("/proc/self/cmdline").read_text(),
    }  # fmt: skip
    with open(sys.argv[1] + ".part", "w") as file:
        json.dump(said, file)
    os.rename(file.name, sys.argv[1])
    print("written")
    while sys.argv[2] == "stay":
        time.sleep(1)
    sys.exit(int(sys.argv[2]))
