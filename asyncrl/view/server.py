"""The page's server, on the loopback address only, for whoever has the key that the command printed.

A browser is made to send requests here by any page that it shows, and other users of the machine can connect: so every
request carries the key, names this host, and only asks. What the page may do is said by its Content-Security-Policy:
run its own script, whose digest is in the policy, and ask this server; nothing else, whatever a model wrote.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import re
import secrets
from base64 import b64encode
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import msgspec

from asyncrl.acceptor.http_server import BoundedServer
from asyncrl.errors import ConfigError, RunError
from asyncrl.view.index import Index
from asyncrl.view.run import ViewedRun

HOST = "127.0.0.1"
PAGE = Path(__file__).parent / "page" / "view.html"
_INLINE = re.compile(r"<(?P<kind>script|style)>(?P<text>.*?)</(?P=kind)>", re.DOTALL)
_MOST_CHARS = 4096
"""Most characters of a request's path."""
_json = msgspec.json.Encoder().encode


def policy(page: str, connect: str) -> str:
    """The Content-Security-Policy of the page: its own script and style by their digests, requests to `connect`.

    >>> policy("<style>a</style><script>b</script>", "'none'").split("; ")[:2]
    ["default-src 'none'", "script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='"]
    """
    digests = {
        match["kind"]: b64encode(hashlib.sha256(match["text"].encode()).digest()).decode()
        for match in _INLINE.finditer(page)
    }
    return (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


class Server(BoundedServer):
    allow_reuse_address = False

    def __init__(self, runs: Sequence[ViewedRun], port: int) -> None:
        """`port` 0: a free one. Raises ConfigError when it cannot be had."""
        self.runs = runs
        self.indices = [Index(run) for run in runs]
        self.key = secrets.token_urlsafe(24)
        self.page = PAGE.read_text()
        self.policy = policy(self.page, "'self'") + "; frame-ancestors 'none'"
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "is in use" if in_use else f"cannot be had ({error})"
            raise ConfigError(f"--port is {port}, which {why}: give another one, or none for a free one.") from error
        for index in self.indices:
            index.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?key={self.key}"

    def server_close(self) -> None:
        super().server_close()
        for index in self.indices:
            index.stop()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error of the viewer."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30
    server_version, sys_version = "asyncrl", ""

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        url = urlsplit(self.path[:_MOST_CHARS])
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if self.headers.get("Host") not in (
            f"{HOST}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            return self._say(403, "This server answers as 127.0.0.1 and localhost only.")
        if not hmac.compare_digest(query.get("key", "").encode(), self.server.key.encode()):
            return self._say(403, "The key is missing or wrong: open the address that asyncrl view printed.")
        if url.path == "/":
            return self._send(200, "text/html; charset=utf-8", self.server.page.encode())
        try:
            answer = answered(self.server, url.path, query)
        except RunError as error:
            return self._say(404, str(error))
        except (KeyError, ValueError, IndexError):
            return self._say(400, "The request is malformed.")
        if answer is None:
            return self._say(404, "There is no such page.")
        self._send(200, "application/json", _json(answer))

    def _say(self, status: int, sentence: str) -> None:
        self._send(status, "application/json", _json({"error": sentence}))

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal has the address only."""


def answered(server: Server, path: str, query: dict[str, str]) -> Any:
    """The answer to one question of the page; None: there is no such question. Raises RunError, KeyError, ValueError,
    IndexError."""
    if path == "/api/runs":
        for index in server.indices:
            index.watched()
        return [state(run, index) for run, index in zip(server.runs, server.indices, strict=True)]
    number = int(query["run"])
    if not 0 <= number < len(server.runs):
        raise IndexError
    run, index = server.runs[number], server.indices[number]
    index.watched()
    match path:
        case "/api/table":
            return content(run, index)
        case "/api/trajectory":
            batch = int(query["batch"]) if "batch" in query else None
            return run.show(int(query["group"]), int(query["index"]), batch)
        case "/api/answers":
            return run.answers(query["set"], int(query["task"]), int(query["index"]))
        case "/api/search":
            return index.search(query["q"], int(query.get("from", "0")))
    return None


def state(run: ViewedRun, index: Index) -> dict[str, Any]:
    """What the page asks for again and again: whether anything is new."""
    return {
        "name": run.folder.name,
        "live": run.live,
        "trouble": run.trouble,
        "revision": run.revision,
        "details": index.revision,
        "complete": index.complete,
    }


def content(run: ViewedRun, index: Index) -> dict[str, Any]:
    """The table of a run, with what has been read of its trajectories."""
    index.begin()
    about = run.about()
    return about | {
        "rows": run.table(),
        "details": [[*key, *found] for key, found in cast(Any, index.details.copy()).items()],
    }
