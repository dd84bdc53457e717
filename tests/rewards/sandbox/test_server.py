"""Connections that ask for nothing, or slowly, keep nobody away: a real server under 1,024 open files."""

from __future__ import annotations

import contextlib
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
from tests.waiting import until

ASKED_S = 3.0
BODIES = 16 << 20
"""Bytes of all bodies together, here."""


class Served:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rewards.sandbox.served", str(ASKED_S), str(BODIES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def held(self) -> int:
        """Bytes of the bodies that have arrived whole and are not answered."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

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


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "1" + "0" * 5000, "1e400", "NaN", "0", "[]"])
def test_a_time_that_is_none_is_refused_with_an_answer(served: Served, seconds: str) -> None:
    """Before, 10**400 dropped the connection."""
    body = f'{{"code": "1", "language": "python", "run_timeout": {seconds}}}'
    with pytest.raises(urllib.error.HTTPError, match="422"):
        urllib.request.urlopen(f"{served.url}/run_code", body.encode(), timeout=20)


def peers(served: Served, count: int, length: int, says: bytes) -> list[socket.socket]:
    """Peers that announce a body of this length and send these bytes."""
    made = [socket.create_connection(("127.0.0.1", served.port), timeout=20.0) for _ in range(count)]
    for peer in made:
        with contextlib.suppress(OSError):  # it was closed for others
            peer.sendall(b"POST /run_code HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % length + says)
    return made


@pytest.mark.parametrize("sent", [0, (8 << 20) - 1])
@pytest.mark.system
def test_bodies_that_do_not_end_keep_nobody_away_and_take_bounded_memory(served: Served, sent: int) -> None:
    """Before, eight that had only been announced took all room, and all others were refused for a minute."""
    before = psutil.Process(served.process.pid).memory_info().rss
    strangers = peers(served, 6, 8 << 20, b" " * sent)
    assert [run(served) for _ in range(2)] == [200] * 2
    assert psutil.Process(served.process.pid).memory_info().rss - before < 3 * BODIES
    for peer in strangers:
        peer.close()


@pytest.mark.system
def test_bodies_beyond_the_limit_together_are_refused(served: Served) -> None:
    """Those that wait for their answer are not closed for others."""
    body = json.dumps({"code": "import time; time.sleep(6)", "language": "python"}).encode()
    body += b" " * (BODIES // 2 - len(body))
    waiting = peers(served, 2, len(body), body)  # both run at once, and leave no room
    assert until(lambda: served.held() == BODIES)
    assert run(served) == 503
    assert [peer.recv(100).split(b"\r\n")[0] for peer in waiting] == [b"HTTP/1.0 200 OK"] * 2
    for peer in waiting:
        peer.close()
    assert until(lambda: run(served) == 200), "what they held is free again"


def run(served: Served) -> int:
    body = json.dumps({"code": "print('" + "x" * (1 << 20) + "'[:3])", "language": "python"}).encode()
    try:
        with urllib.request.urlopen(f"{served.url}/run_code", body, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
