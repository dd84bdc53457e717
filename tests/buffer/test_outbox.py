"""Replies that are kept for a repeat of their request take bounded memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from asyncrl.buffer.requests import outbox
from asyncrl.buffer.requests.outbox import Outbox


def test_large_replies_to_peers_that_never_ask_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_REMEMBERED_BYTES", 1000)
    nothing: Any = None  # neither socket nor buffer is used before the replies are flushed
    kept = Outbox(nothing, nothing, 0.0, lambda: 0.0, Counter())
    for number in range(8):
        kept.record(b"%d" % number, 0, [bytes(150), memoryview(bytes(150))])
    assert [n for n in range(8) if kept.repeat(b"%d" % n, 0)] == [5, 6, 7]
    kept.record(b"7", 1, [bytes(10)])
    kept.record(b"8", 0, [bytes(300)])
    assert [n for n in range(9) if kept.repeat(b"%d" % n, 1 if n == 7 else 0)] == [5, 6, 7, 8]
    kept.record(b"9", 0, [bytes(5000)])
    assert [n for n in range(10) if kept.repeat(b"%d" % n, 0)] == [9], "the newest stays, whatever its size"
