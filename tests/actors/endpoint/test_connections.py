"""Connections that ask for nothing, or slowly, take nothing from agents: a real endpoint under 1,024 open files."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO
from urllib.parse import urlsplit

import psutil
import pytest

from tests.strangers import strangers

HEAD_S, BODY_S = 2.0, 5.0
"""A body may come behind a thousand connections of others, on a busy machine."""
HEAD = b"POST %s/chat/completions HTTP/1.1\r\nHost: x\r\n"


class Served:
    def __init__(self, log: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.actors.endpoint.served", str(HEAD_S), str(BODY_S)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        url = urlsplit(self.process.stdout.readline().strip())
        assert url.port is not None
        self.port, self.path = url.port, url.path

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20.0)

    def answered(self) -> bool:
        """Whether an agent with a new connection is served."""
        agent = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20.0)
        agent.request("GET", f"{self.path}/models")
        status = agent.getresponse().status
        agent.close()
        return status == 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    with log.open("wb") as file:
        made = Served(file)
    yield made
    made.process.communicate("", timeout=20.0)
    assert made.process.returncode == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    "says",
    [
        b"POST /r/x/v1/chat/completions HTTP/1.1\r\n",
        pytest.param(b"", marks=pytest.mark.system),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", marks=pytest.mark.system),
    ],
)
def test_2000_connections_that_ask_for_nothing_use_up_no_files(served: Served, says: bytes) -> None:
    """Before, some 1,010 left the actor without a file, and no agent was served any more."""
    with strangers(served.port, 2000, says):
        assert all(served.answered() for _ in range(20))
        assert psutil.Process(served.process.pid).num_fds() < 800


def closed_within(seconds: float, peer: socket.socket, says: bytes) -> bytes:
    """What the endpoint says to a peer that sends these bytes one by one, until it closes the connection."""
    peer.settimeout(0.1)
    deadline, said, at = time.monotonic() + seconds, b"", 0
    while time.monotonic() < deadline:
        try:
            peer.send(says[at % len(says) : at % len(says) + 1])
            at += 1
            if not (got := peer.recv(4096)):
                return said
            said += got
        except TimeoutError:
            continue
        except OSError:
            return said
    raise AssertionError(f"still open after {seconds} s")


def test_a_head_has_a_deadline_also_on_a_connection_that_was_served_before(served: Served) -> None:
    """Before, it had none: one byte now and then kept a connection for ever."""
    for requests in (0, 1):
        peer = served.connect()
        for _ in range(requests):
            peer.sendall(b"GET %s/models HTTP/1.1\r\nHost: x\r\n\r\n" % served.path.encode())
            assert b"200" in peer.recv(4096)
        closed_within(HEAD_S + 40.0, peer, b"POST / HTTP/1.1\r\n" + b"X: " + b"a" * 1000)
        peer.close()


def test_a_body_has_a_deadline(served: Served) -> None:
    """Before, it had none."""
    peer = served.connect()
    peer.sendall(HEAD % served.path.encode() + b"Content-Length: 1000\r\n\r\n")
    said = closed_within(BODY_S + HEAD_S + 40.0, peer, b" " * 1000)
    assert b"408" in said.split(b"\r\n")[0]
    assert b"within" in said
    peer.close()


def test_a_head_has_a_largest_size(served: Served) -> None:
    peer = served.connect()
    peer.sendall(HEAD % served.path.encode() + b"X: " + b"a" * (1 << 17))
    assert b"400" in peer.recv(4096).split(b"\r\n")[0]
    peer.close()


def test_an_agent_whose_answer_is_under_way_is_not_closed_for_others(served: Served) -> None:
    peer = served.connect()
    peer.sendall(HEAD % served.path.encode() + b"Content-Length: 2\r\n\r\n")
    with strangers(served.port, 1000):
        peer.sendall(b"[]")
        assert b"HTTP/1.1 400" in peer.recv(4096)
    peer.close()


def test_an_agent_that_leaves_while_it_asks_writes_no_traceback_into_the_log(served: Served) -> None:
    """Before, each wrote a traceback of some 40 lines; `served` reads the log at the end."""
    peer = served.connect()
    peer.sendall(HEAD % served.path.encode() + b"Content-Length: 1000\r\n\r\nx")
    assert served.answered()
    peer.close()
    assert served.answered()
