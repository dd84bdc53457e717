"""`asyncrl sandbox` under 1,024 open files, with another deadline and room for fewer bytes of bodies: `python -m
tests.rewards.sandbox.served SECONDS BYTES`. It prints its port, and ends with its standard input."""

from __future__ import annotations

import resource
import sys
import threading

from asyncrl.acceptor import http_server
from asyncrl.rewards.sandbox.local import LocalSandbox
from asyncrl.rewards.sandbox.server import make_server

if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    http_server.ASKED_S, http_server.MOST_BODIES = float(sys.argv[1]), int(sys.argv[2])
    serving = make_server(LocalSandbox(), "127.0.0.1", 0, 2)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    print(serving.server_port, flush=True)
    sys.stdin.read()
