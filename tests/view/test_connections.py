"""Connections that ask for nothing keep no browser away: a real viewer's server under 1,024 open files."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from urllib.parse import urlsplit

import psutil
import pytest

from tests.strangers import strangers


@pytest.mark.parametrize("says", [b"", pytest.param(b"GET / HTTP/1.1\r\n", marks=pytest.mark.system)])
@pytest.mark.system
def test_2000_connections_that_ask_for_nothing_keep_no_browser_away(says: bytes) -> None:
    """Before, some 1,010 left the viewer without a file, and nobody was answered for half a minute."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.view.served"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    port = urlsplit(url).port
    assert port is not None
    try:
        with strangers(port, 2000, says):
            for _ in range(20):
                with urllib.request.urlopen(url, timeout=20) as answer:
                    assert answer.status == 200
            assert psutil.Process(process.pid).num_fds() < 800
    finally:
        process.communicate("", timeout=20.0)
