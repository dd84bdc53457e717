"""`asyncrl sandbox`: the local sandbox served by SandboxFusion's contract, for many machines or other tools.

takes: POST /run_code, one thread per request; as many run at once as the sandbox allows, the others wait
gives: SandboxFusion's answer; GET /v1/ping says pong
"""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from asyncrl.acceptor.http_server import BoundedServer
from asyncrl.errors import RunError
from asyncrl.rewards.sandbox.contract import Result, Run, request_from_json, result_to_json
from asyncrl.rewards.sandbox.local import LocalSandbox

_MOST_BYTES = 32 << 20
MOST_SECONDS = 300.0
"""Longest run; a request for a longer one is refused."""


class _Server(BoundedServer):
    def __init__(self, sandbox: LocalSandbox, address: tuple[str, int], concurrency: int) -> None:
        self._sandbox, self._slots = sandbox, threading.BoundedSemaphore(concurrency)
        super().__init__(address, _Handler)

    def result(self, run: Run) -> Result:
        with self._slots:
            try:
                return self._sandbox.run_now(run)
            except Exception as error:
                return Result("SandboxError", f"{type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 30.0

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/v1/ping" else 404, "pong" if self.path == "/v1/ping" else "no such page")

    def do_POST(self) -> None:
        if self.path != "/run_code":
            return self._answer(404, {"detail": f"{self.path}: there is only /run_code"})
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= _MOST_BYTES:
                raise ValueError(f"{length} bytes; expected at most {_MOST_BYTES}")
        except ValueError as error:
            return self._answer(422, {"detail": str(error)})
        with self.server.body(self.connection, self.rfile, length) as body:
            if body is None:
                return self._answer(503, {"detail": "too many large requests at once: send it again later"})
            self._run(body)

    def _run(self, body: bytearray) -> None:
        try:
            run = request_from_json(json.loads(body))
            if not 0 < run.run_timeout <= MOST_SECONDS:
                raise ValueError(f"run_timeout is {run.run_timeout}: expected 0 to {MOST_SECONDS} s")
        except (ValueError, RecursionError) as error:
            return self._answer(422, {"detail": str(error)})
        self._answer(200, result_to_json(self.server.result(run)))

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: there are thousands of runs."""


def make_server(sandbox: LocalSandbox, host: str, port: int, concurrency: int) -> BoundedServer:
    """A server that is bound and does not serve yet. Port 0: the first free one. Raises OSError."""
    return _Server(sandbox, (host, port), concurrency)


def serve(sandbox: LocalSandbox, host: str, port: int, concurrency: int) -> int:
    """Serve until interrupted; returns the exit code. Raises RunError if the sandbox cannot work here."""
    probe = sandbox.run_now(Run("print(1)"))
    if probe.status != "Success":
        raise RunError(f"the sandbox does not work here: {probe.message}")
    try:
        server = make_server(sandbox, host, port, concurrency)
    except OSError as error:
        raise RunError(f"{host}:{port} cannot be bound: {error.strerror}. Choose another --port or --host.") from error
    print(f"sandbox at http://{host}:{server.server_port}  (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()
    return 0
