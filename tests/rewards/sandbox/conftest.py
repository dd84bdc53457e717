"""What every test of the jail leaves: nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("jails")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    mounts = Path("/proc/self/mountinfo").read_text().count("\n")
    children = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 60
    mine = lambda: [p for p in psutil.Process().children(recursive=True) if p.pid not in children]  # noqa: E731
    while mine() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert mine() == []
    assert list(folder.iterdir()) == []
    assert Path("/proc/self/mountinfo").read_text().count("\n") == mounts
