"""The server: who may ask, what is answered, and one sentence for each thing that is not there."""

from __future__ import annotations

import hashlib
import html
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.cli import main
from asyncrl.trajectory import Row, Trajectory
from asyncrl.view import command
from asyncrl.view.detail import PIECE_CHARS, TEXT_CHARS, detail
from asyncrl.view.run import NOT_KEPT, ViewedRun
from asyncrl.view.server import Server, policy
from tests.view.made_run import TEXT, MadeRun
from tests.view.serving import served


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    run = MadeRun(tmp_path_factory.mktemp("view") / "run")
    for _ in range(3):
        run.step()
    run.close()
    return run


@contextmanager
def serving(run: ViewedRun) -> Iterator[Server]:
    """The server of one run, which is closed with it."""
    with closing(run), served(run) as server:
        yield server


@pytest.fixture(scope="module")
def server(made: MadeRun) -> Iterator[Server]:
    with serving(ViewedRun(made.run, text=TEXT)) as started:
        yield started


def get(server: Server, path: str, key: str | None = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    sep = "&" if "?" in path else "?"
    url = f"http://127.0.0.1:{server.server_port}{path}{sep}key={server.key if key is None else key}"
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read()
        kind = answer.headers["Content-Type"]
        return answer.status, dict(answer.headers), json.loads(body) if kind == "application/json" else body.decode()


def test_it_listens_on_the_loopback_address_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.startswith(f"http://127.0.0.1:{server.server_port}/?key=")


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/table?run=0", "/api/trajectory?run=0&group=0&index=0"])
def test_without_the_key_or_under_another_name_nothing_is_answered(server: Server, path: str) -> None:
    assert get(server, path)[0] == 200
    assert get(server, path, key="")[0] == 403
    assert get(server, path, key=server.key[:-1])[0] == 403
    assert get(server, path, key="\u00e9".encode().decode("latin1").encode("ascii", "ignore").decode())[0] == 403
    status, _, answer = get(server, path, Host=f"evil.example:{server.server_port}")
    assert (status, answer["error"]) == (403, "This server answers as 127.0.0.1 and localhost only.")


def test_only_questions_are_answered(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        url = f"http://127.0.0.1:{server.server_port}/api/runs?key={server.key}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, method=method, data=b""), timeout=20)
        assert refused.value.code == 501
        refused.value.close()


def test_the_page_may_run_its_own_script_and_ask_nobody_else(server: Server) -> None:
    _, headers, page = get(server, "/")
    rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert rules["script-src"] != policy(page.replace("HEIGHT = 24", "HEIGHT = 25"), "'self'").split("; ")[1]
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http://", "https://", "<link"):
        assert word not in page, f"{word}: a model's text is no markup, and the page asks no other host"


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/trajectory?run=0&group=999&index=0", 404, "The run has no trajectory 999.0."),
        ("/api/trajectory?run=7&group=0&index=0", 400, "malformed"),
        ("/api/trajectory?run=-1&group=0&index=0", 400, "malformed"),
        ("/api/trajectory?run=0&group=x&index=0", 400, "malformed"),
        ("/api/trajectory?run=0&group=99999999999999999999999&index=0", 404, "The run has no trajectory 9999"),
        ("/api/search?run=0", 400, "malformed"),
        ("/../../etc/passwd?run=0", 404, "no such page"),
        ("/api/none?run=0", 404, "no such page"),
    ],
)
def test_what_is_not_there_is_one_sentence(server: Server, path: str, status: int, said: str) -> None:
    got, _, answer = get(server, path)
    assert got == status
    assert said in answer["error"]


def test_every_number_of_a_trajectory(server: Server, made: MadeRun) -> None:
    sampled = 0
    for (group, index), t in made.put.items():
        _, _, shown = get(server, f"/api/trajectory?run=0&group={group}&index={index}")
        (row,), (stored,) = shown["rows"], t.rows
        assert shown["digest"] == t.digest()
        assert row["ids"] == stored.token_ids.tolist()
        assert np.array_equal(np.float32(row["logprobs"]), stored.logprobs)
        assert (row["versions"], row["sampled"]) == (stored.versions.tolist(), stored.mask.tolist())
        assert "".join(row["pieces"]) == "".join(map(chr, row["ids"]))
        assert shown["recorded"] == ("weights" in row)
        sampled += shown["recorded"]
    assert sampled == 3 * 4


def test_the_search_reads_every_text_in_steps(server: Server, made: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.view import index

    monkeypatch.setattr(index, "SEARCH_S", 0.0)
    hits, at = [], 0
    while at is not None:
        _, _, answer = get(server, f"/api/search?run=0&q=the+answer+of+1.&from={at}")
        hits += answer["hits"]
        at = answer["next"]
    assert sorted(map(tuple, hits)) == sorted(key for key in made.put if key[0] == 1)


def test_a_damaged_payload_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", samples=0)
    made.step()
    made.close()
    (segment,) = [path for path in (made.run.buffer / "payloads").iterdir() if path.stat().st_size]
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    with serving(ViewedRun(made.run, text=TEXT)) as server:
        status, _, answer = get(server, "/api/trajectory?run=0&group=0&index=0")
        assert (status, answer["error"]) == (404, f"the payload of 0.0 is damaged: {segment} was cut or changed.")
        assert get(server, "/api/trajectory?run=0&group=0&index=1")[0] == 200
        segment.unlink()
        assert "No such file" in get(server, "/api/trajectory?run=0&group=0&index=1")[2]["error"]


def test_reclaimed_payloads_leave_the_samples(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", samples=1)
    made.step()
    made.buffer.database.write("UPDATE groups SET payload = 0")
    made.close()
    with serving(ViewedRun(made.run, text=TEXT)) as server:
        _, _, shown = get(server, "/api/trajectory?run=0&group=0&index=2")
        assert shown["from"] == "sample"
        assert "".join(shown["rows"][0]["pieces"]) == "".join(map(chr, made.put[0, 2].rows[0].token_ids))
        assert get(server, "/api/trajectory?run=0&group=1&index=2")[2]["error"] == NOT_KEPT


def test_a_sample_of_another_history_is_not_taken_for_this_one(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", samples=1)
    made.step()
    made.close()
    (file,) = made.run.rollouts.iterdir()
    file.write_text(file.read_text().replace(made.put[0, 1].digest(), "0" * 32))
    with serving(ViewedRun(made.run, text=TEXT)) as server:
        assert get(server, "/api/trajectory?run=0&group=0&index=1")[2]["recorded"] is False
        assert get(server, "/api/trajectory?run=0&group=0&index=2")[2]["recorded"] is True


def a_long(made: MadeRun, tokens: int) -> Trajectory:
    ids = np.full(tokens, ord("w"), np.int32)
    mask = np.arange(tokens) > 0
    row = Row(ids, mask, np.where(mask, -1, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32))
    return replace(made.put[0, 0], rows=(row,))


def test_a_text_of_ten_megabytes_is_cut_and_counted(made: MadeRun) -> None:
    from asyncrl.tracking.rollouts.text import TokenText

    words = TokenText(lambda ids: "".join("word " * 1000 for _ in ids))  # 5,000 characters a token
    shown = detail(a_long(made, 2100), None, words)
    (row,) = shown["rows"]
    assert sum(map(len, row["pieces"])) <= TEXT_CHARS
    assert len(row["pieces"]) == len(row["ids"]) == len(row["logprobs"]) == 2100 - row["cut"]
    assert row["pieces"][0] == ("word " * 1000)[:PIECE_CHARS] + "[1000 more]"
    assert len(json.dumps(shown)) < 4 * TEXT_CHARS
    (row,) = detail(a_long(made, 70_000), None, TEXT)["rows"]
    assert row["cut"] == 70_000 - 65_536


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), capsys.readouterr().err


def test_bad_input_is_one_sentence(made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, priority = str(made.run.path), os.nice(0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, sentence = said(["view", path, "--port", str(port), "--no-browser"], capsys)
    assert (code, sentence) == (2, f"asyncrl: --port is {port}, which is in use: give another one, or none for a free "
                                "one.\n")  # fmt: skip
    assert "--port is 70000: expected 0 to 65535" in said(["view", path, "--port", "70000"], capsys)[1]
    assert "view is given 3 run folders: expected one or two." in said(["view", path, path, path], capsys)[1]
    assert "holds no run" in said(["view", str(tmp_path)], capsys)[1]
    code, sentence = said(["view", path, "--export", str(tmp_path / "no" / "page.html")], capsys)
    assert (code, "which cannot be written: No such file or directory." in sentence) == (1, True)
    assert os.nice(0) == priority, "what fails leaves the process that called it as it was"


def test_a_ledger_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeRun(tmp_path / "run")
    made.step()
    made.buffer.database._db.execute("PRAGMA user_version = 99")
    made.close()
    ledger = made.run.buffer / "ledger.sqlite"
    assert "it has version 99 of the tables, this asyncrl reads" in said(["view", str(made.run.path)], capsys)[1]
    ledger.write_bytes(b"no database" * 1000)
    assert "ledger.sqlite cannot be read: file is not a database." in said(["view", str(made.run.path)], capsys)[1]
    ledger.unlink()
    assert "holds no ledger (ledger.sqlite)" in said(["view", str(made.run.path)], capsys)[1]


def test_without_a_browser_the_address_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    with command.opened("http://127.0.0.1:1/") as shown:
        assert shown is False


def test_the_key_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read the browser's. What it is given instead only the owner can read."""
    given = tmp_path / "given"
    script = tmp_path / "browser"
    script.write_text(f'#!/bin/sh\nprintf %s "$*" > {given}.new && mv {given}.new {given}\n')
    script.chmod(0o755)
    browser = webbrowser.GenericBrowser(str(script))
    monkeypatch.setenv("BROWSER", str(script))
    monkeypatch.setattr(webbrowser, "open", browser.open)
    url = "http://127.0.0.1:1/?key=a-secret_key&x=1"
    with command.opened(url) as shown:
        assert shown
        words = given.read_text()
        assert "secret" not in words
        page = Path(urllib.request.url2pathname(urllib.parse.urlsplit(words).path))
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
        assert html.unescape(page.read_text()).count(f"url={url}") == 1
    assert not page.parent.exists()


def test_an_export_cannot_be_left_by_its_data(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", words=lambda _: "</script><script>owned()</script><!--\u2028")
    made.step()
    run = ViewedRun(made.close(), text=TEXT)
    assert command.write([run], tmp_path / "page.html") == (len(made.put), len(made.put))
    run.close()
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == 2, "the data and the page's own"
    assert "connect-src 'none'" in page
    data = page.split('id="data">')[1].split("</script>")[0]
    text = "".join(json.loads(data)["trajectories"]["0/0/1"]["rows"][0]["pieces"])
    assert text.endswith("</script><script>owned()</script><!--\u2028")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_command_serves_until_it_is_interrupted_and_changes_nothing(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "run", samples=0)
    made.step()
    made.close()
    before = digests(made.run.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "view", str(made.run.path), "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate(timeout=10)
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"asyncrl view" in answer.read()
        with urllib.request.urlopen(url.replace("/?", "/api/trajectory?run=0&group=0&index=1&"), timeout=60) as answer:
            shown = json.loads(answer.read())
        assert shown["note"].startswith("Tokens are shown by their numbers: model.path is")
        assert "".join(shown["rows"][0]["pieces"]).startswith("<60>"), "a token of no known text"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    assert (process.returncode, err) == (0, "")
    assert digests(made.run.path) == before
