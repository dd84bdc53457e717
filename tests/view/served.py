"""The viewer's server under 1,024 open files: `python -m tests.view.served`. It prints its address, and ends with its
standard input."""

from __future__ import annotations

import resource
import sys
import threading

from asyncrl.view.server import Server

if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    serving = Server([], 0)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    print(serving.url, flush=True)
    sys.stdin.read()
