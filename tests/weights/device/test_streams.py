"""Nothing of a broadcast is on the stream on which training computes: F8, with a fake of torch.cuda's streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.weights.device import process_group
from asyncrl.weights.device.process_group import ProcessGroup
from tests.weights.device.fake_cuda import DEFAULT, FakeChunk, FakeCuda, FakeNccl


def test_weights_are_sent_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(process_group.torch, "cuda", cuda)
    monkeypatch.setattr(process_group.dist, "BroadcastOptions", SimpleNamespace)
    group: Any = ProcessGroup.__new__(ProcessGroup)
    group._group, group._wait_s, group._stream, group._connected = FakeNccl(cuda), 1.0, None, True
    chunks: Any = [FakeChunk(), FakeChunk(), FakeChunk()]
    group.send(chunks)
    assert len(cuda.sent_on) == 3
    assert DEFAULT not in cuda.sent_on + cuda.waited_for
    assert cuda.made == 1
    assert cuda.current == DEFAULT
