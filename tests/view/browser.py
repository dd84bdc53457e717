"""A real browser without a window, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0


def found() -> str | None:
    """The browser's command: that of ASYNCRL_BROWSER, or one that is installed."""
    return os.environ.get("ASYNCRL_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, folder: Path) -> None:
        """`folder`: for its profile."""
        command = found()
        assert command is not None
        self.messages: list[dict[str, Any]] = []
        """Events that came: errors of the page, what it asked for."""
        self._numbers = itertools.count(1)
        self._process = subprocess.Popen(
            [
                command, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
                f"--user-data-dir={folder}", "--window-size=1600,900", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )  # fmt: skip
        try:
            port, _ = _awaited(lambda: _lines(folder / "DevToolsActivePort"))
            self._socket = connect(self._page(port), max_size=64 << 20, open_timeout=DEADLINE_S)
        except BaseException:
            self.close()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _page(self, port: str) -> str:
        import urllib.request

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=DEADLINE_S) as answer:
            pages = json.loads(answer.read())
        return str(next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"))

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": given}))
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            message = json.loads(self._socket.recv(timeout=DEADLINE_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self.messages.append(message)
        raise TimeoutError(method)

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        import psutil

        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def open(self, url: str) -> None:
        """Returns once the table is there."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.messages.clear()
        self.call("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.opened !== undefined")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.js(expression):
            assert time.monotonic() < deadline, f"not in {DEADLINE_S} s: {expression}"
            time.sleep(0.02)

    @property
    def errors(self) -> list[str]:
        """Exceptions of the page, and what its policy refused."""
        found = [m["params"]["exceptionDetails"] for m in self.messages if m["method"] == "Runtime.exceptionThrown"]
        logged = [m["params"]["entry"] for m in self.messages if m["method"] == "Log.entryAdded"]
        return [*map(str, found), *(str(entry) for entry in logged if entry["level"] == "error")]

    @property
    def asked(self) -> list[str]:
        """The addresses that the page asked for."""
        return [m["params"]["request"]["url"] for m in self.messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, width: int = 1600, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.2)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _awaited(look: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (seen := look()):
        assert time.monotonic() < deadline, "the browser did not start"
        time.sleep(0.05)
    return seen
