"""`asyncrl sandbox` under 1,024 open files, with another deadline and room for fewer bytes of bodies: `python -m
tests.rewards.sandbox.served SECONDS BYTES`. It prints its port, for each line of its standard input the bytes of the
bodies that have arrived whole and are not answered, and ends with its input."""

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
    for _ in sys.stdin:
        with serving._changed:
            print(sum(serving._bodies[peer] for peer in serving._bodies if peer not in serving._asking), flush=True)
