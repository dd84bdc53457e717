"""Processes that hold many connections: each has a limit of open files of its own, so no limit need be raised."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

EACH = 500
_CONNECT = """
import socket, sys, time
port, count, said = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
held = []
for _ in range(count):
    one = socket.socket()
    one.settimeout(5.0)
    try:
        one.connect(("127.0.0.1", port))
        one.sendall(said)
    except OSError:
        pass
    held.append(one)
print(len(held), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def strangers(port: int, count: int, says: bytes = b"") -> Iterator[None]:
    """`count` connections to this port of loopback, each of which has said this; they last as long as the context."""
    made = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CONNECT, str(port), str(EACH), says.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(count // EACH)
    ]
    try:
        for each in made:
            assert each.stdout is not None
            assert each.stdout.readline().strip() == str(EACH).encode()
        yield
    finally:
        for each in made:
            each.kill()
            each.communicate()
