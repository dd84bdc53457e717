"""Connections that ask for nothing, or slowly, keep nobody away: a real server under 1,024 open files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from tests.strangers import strangers

ASKED_S = 3.0


class Served:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rewards.sandbox.served", str(ASKED_S)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def ping(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/ping", timeout=20) as answer:
            return str(json.loads(answer.read()))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.process.communicate("", timeout=20.0)


@pytest.mark.parametrize("says", [b"", pytest.param(b"POST /run_code HTTP/1.1\r\n", marks=pytest.mark.system)])
def test_2000_connections_that_ask_for_nothing_keep_nobody_away(served: Served, says: bytes) -> None:
    """Before, some 1,010 did for as long as they lasted."""
    with strangers(served.port, 2000, says):
        assert [served.ping() for _ in range(20)] == ["pong"] * 20
        assert run(served) == 200
        assert psutil.Process(served.process.pid).num_fds() < 800


@pytest.mark.parametrize(
    "first", [b"POST /run_code HTTP/1.1\r\nX: ", b"POST /run_code HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"]
)
def test_a_request_has_a_deadline(served: Served, first: bytes) -> None:
    """Before, one byte every half minute kept a thread for ever."""
    peer = socket.create_connection(("127.0.0.1", served.port), timeout=0.1)
    peer.sendall(first)
    deadline, ended = time.monotonic() + ASKED_S + 40.0, False
    while not ended and time.monotonic() < deadline:
        try:
            peer.send(b" ")
            ended = peer.recv(4096) == b""
        except TimeoutError:
            continue
        except OSError:
            ended = True
    assert ended, "it is still open"
    peer.close()


def test_bodies_beyond_the_limit_together_are_refused(served: Served) -> None:
    """Each may have 32 MiB: before, a few hundred that never ended took all memory."""
    head = b"POST /run_code HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (32 << 20)
    peers = [socket.create_connection(("127.0.0.1", served.port), timeout=20.0) for _ in range(9)]
    for peer in peers:
        peer.sendall(head)
        time.sleep(0.05)
    assert b"503" in peers[-1].recv(4096).split(b"\r\n")[0]
    for peer in peers:
        peer.close()
    deadline = time.monotonic() + 20.0
    while (code := run(served)) == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert code == 200, "what they held is free again"


def run(served: Served) -> int:
    body = json.dumps({"code": "print('" + "x" * (8 << 20) + "'[:3])", "language": "python"}).encode()
    try:
        with urllib.request.urlopen(f"{served.url}/run_code", body, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
