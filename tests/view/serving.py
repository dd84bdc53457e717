"""The viewer's server in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.view.run import ViewedRun
from asyncrl.view.server import Server


@contextmanager
def served(*runs: ViewedRun) -> Iterator[Server]:
    server = Server(runs, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
