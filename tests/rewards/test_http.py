"""A service's answer is read up to a bound."""

from __future__ import annotations

import asyncio
import threading
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
