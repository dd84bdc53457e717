"""The processes below this one that a test looks for; other tests may have left some of their own."""

from __future__ import annotations

import contextlib

import psutil


def children(word: str) -> set[psutil.Process]:
    """Those that live and have `word` in their command line."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, or is a zombie
            if word in " ".join(process.cmdline()):
                found.add(process)
    return found
