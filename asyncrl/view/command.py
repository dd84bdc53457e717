"""`asyncrl view`: serves the page until it is interrupted, or writes it to a file."""

from __future__ import annotations

import html
import os
import signal
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import RunError
from asyncrl.process.priority import lower_this_process
from asyncrl.run_folder import RunFolder
from asyncrl.view.index import Index
from asyncrl.view.run import ViewedRun
from asyncrl.view.server import PAGE, Server, content, policy
from asyncrl.view.table import Key

_EXPORT_BYTES = 48 << 20
"""Most bytes of the trajectories in an exported page."""
_NO_BROWSER = "No browser could be opened here: open the address above in one, over ssh -L if it is elsewhere."


def view(folders: Sequence[Path], *, port: int, browser: bool, export: Path | None) -> int:
    """Returns when interrupted (Ctrl-C), or when the file is written. Raises RunError and ConfigError."""
    with ExitStack() as opened:
        runs = []
        for folder in folders:
            runs.append(ViewedRun(RunFolder.existing(folder)))
            opened.callback(runs[-1].close)
        if export is not None:
            kept, of = write(runs, export)
            print(f"{export}: {kept} of {of} trajectories with their text")
            return 0
        serve(runs, port, browser)
    return 0


def serve(runs: Sequence[ViewedRun], port: int, browser: bool) -> None:
    lower_this_process()
    server = Server(runs, port)
    try:
        thread = threading.Thread(target=server.serve_forever, args=(0.2,), name="http", daemon=True)
        thread.start()
        print(f"{server.url}\nCtrl-C ends the viewer; a live run goes on.", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with ExitStack() as shown:
                if browser and not shown.enter_context(opened(server.url)):
                    print(_NO_BROWSER)
                threading.Event().wait()
        except KeyboardInterrupt:
            print()
        server.shutdown()
    finally:
        server.server_close()


@contextmanager
def opened(url: str) -> Iterator[bool]:
    """Whether a browser with a window of its own was opened; one in the terminal would take the terminal.

    The browser is given a file that leads to `url` and that only its owner can read: its command line is readable by
    every user of the machine, and `url` holds the key. The file is removed at the end.
    """
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER")):
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="asyncrl-view-") as folder:  # mode 0700
        page = Path(folder) / "open.html"
        page.touch(mode=0o600)
        page.write_text(_REDIRECT.format(url=html.escape(url)), encoding="utf-8")
        try:
            done = webbrowser.open(page.as_uri())
        except webbrowser.Error:
            done = False
        yield done


_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>asyncrl view</title>
"""


def write(runs: Sequence[ViewedRun], path: Path) -> tuple[int, int]:
    """One page that holds the runs and asks nobody. Returns how many trajectories it has in full, and of how many.

    Those with samples come first, then the newest, up to a bound. Raises RunError when the file cannot be written.
    """
    tables, shown, size = [], {}, 0
    for number, run in enumerate(runs):
        index = Index(run)
        sampled = set(run.about()["sampled"])
        for key in sorted(run.keys(), key=lambda key: (key not in sampled, -key[0], key[1])):
            if size > _EXPORT_BYTES * (number + 1) // len(runs):
                break
            detail = _shown(run, index, key)
            if detail is not None:
                shown[f"{number}/{key[0]}/{key[1]}"] = detail
                size += len(detail)
        tables.append(content(run, index))
    answers = _answers(runs, _EXPORT_BYTES // 4)
    raw = {name: {key: msgspec.Raw(made) for key, made in found.items()} for name, found in
           (("trajectories", shown), ("answers", answers))}  # fmt: skip
    data = _json({"tables": tables, **raw})
    # Nothing in the data can end the element that holds it.
    text = data.decode().replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    page = PAGE.read_text()
    nobody = policy(page, "'none'")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{nobody}">'
    page = page.replace("<!-- policy -->", meta).replace("<!-- data -->", _element(text))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"--export is {path}, which cannot be written: {error.strerror}.") from error
    return len(shown), sum(len(run.keys()) for run in runs)


def _answers(runs: Sequence[ViewedRun], most: int) -> dict[str, bytes]:
    """Those of held-out tasks, as many as fit into `most` bytes."""
    found: dict[str, bytes] = {}
    for number, run in enumerate(runs):
        for of_set, task, index, *_ in run.about()["held_out"]:
            made = _json(run.answers(of_set, task, index))
            most -= len(made)
            if most < 0:
                return found
            found[f"{number}/{of_set}/{task}/{index}"] = made
    return found


_json = msgspec.json.Encoder().encode


def _element(text: str) -> str:
    return f'<script type="application/json" id="data">{text}</script>'


def _shown(run: ViewedRun, index: Index, key: Key) -> bytes | None:
    index.add(key)
    try:
        shown: dict[str, Any] = run.show(*key)
    except RunError:
        return None
    return _json(shown)
