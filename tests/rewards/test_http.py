"""A service's answer is read up to a bound of bytes, and of time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from asyncrl.rewards import http


def test_an_answer_that_is_too_long_is_an_outage_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'"' + b"x" * int(self.path[1:]) + b'"'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    monkeypatch.setattr(http, "_MOST_BYTES", 1000)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert len(asyncio.run(http.get(f"{url}/998"))) == 998
        with pytest.raises(http.ServiceFailed, match="more than 1000 bytes"):
            asyncio.run(http.get(f"{url}/999"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


HALVES = {
    "half a head": b"HTTP/1.1 200 OK\r\nX: ",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
    "half an error": b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n",
}


@contextlib.contextmanager
def dripping(says: bytes) -> Iterator[str]:
    """The address of a service that says this to every request, then a byte now and then, and never ends."""
    over, threads = threading.Event(), []

    def drip(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):  # the client gave up
            peer.recv(4096)
            peer.sendall(says)
            while not over.wait(0.05):
                peer.sendall(b" ")

    def serve() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threads.append(threading.Thread(target=drip, args=(listening.accept()[0],)))
                threads[-1].start()

    listening = socket.create_server(("127.0.0.1", 0))
    threads.append(threading.Thread(target=serve))
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize("what", HALVES)
def test_a_service_that_never_ends_its_answer_has_a_deadline_and_stops_no_event_loop(what: str) -> None:
    """Before, each byte began the time anew, and an error's text was read in the event loop, whose episodes all stood
    still for as long: 300 bytes of it, each within `timeout_s`."""

    async def asked(url: str) -> int:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.02)
                beats += 1

        beating = asyncio.create_task(beat())
        with pytest.raises(http.ServiceFailed, match=r"2 attempts: TimeoutError: no whole answer within 0\.5 s"):
            await asyncio.wait_for(http.post(url, {}, timeout_s=0.5, retries=1, backoff_s=0.01), 30.0)
        beating.cancel()
        return beats

    with dripping(HALVES[what]) as url:
        assert asyncio.run(asked(url)) > 5
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
