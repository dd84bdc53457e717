"""The recorder of logprobs on a GPU (F11), over a fake of vLLM's model runner in both versions."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.engines.vllm.engine import _generation
from asyncrl.actors.engines.vllm.gpu_sampler import arrives, install, record, why_not
from asyncrl.actors.engines.vllm.logprob_board import LogprobBoard
from asyncrl.actors.engines.vllm.requests import Request
from tests.actors.engines.fake_gpu_runner import FakeRunner, FakeSampler, FakeSampler024, of_sampled, params

ROWS, ROOM = 4, 8
both = pytest.mark.parametrize("kind", [FakeSampler, FakeSampler024])


def recording(kind: type[FakeSampler]) -> tuple[FakeRunner, torch.Tensor]:
    runner, values = FakeRunner(kind), torch.full((ROWS + 1, ROOM), torch.nan)
    assert why_not(runner) == ""
    record(runner, values, of_sampled)
    return runner, values


@both
def test_the_kth_token_of_a_request_has_its_logprob_at_row_k(kind: type[FakeSampler]) -> None:
    runner, values = recording(kind)
    runner.add(0, params([2, 7]), prompt=5)
    runner.add(3, params([0, 8], temperature=0.5), prompt=2)
    expected: dict[int, list[float]] = {2: [], 0: []}
    for k in range(4):
        made, logprobs = runner.step({3: 2 + k, 0: 5 + k})
        for row, token, distribution in zip((0, 2), made, logprobs, strict=True):
            expected[row].append(float(distribution[token]))
    for row, found in expected.items():
        assert values[row, :4].tolist() == pytest.approx(found, abs=1e-6)
    assert values[:ROWS].isfinite().sum() == 8, "nothing else was written"
    assert runner.sampler.use_flashinfer is False, "it would return logits from before top-k and top-p"


@both
def test_a_piece_of_a_prefill_and_a_preempted_request_write_no_value_twice(kind: type[FakeSampler]) -> None:
    runner, values = recording(kind)
    runner.add(1, params([3, 0]), prompt=6)
    runner.step({1: 4})  # a piece: its token is thrown away
    assert not values[:ROWS].isfinite().any()
    runner.step({1: 6})
    runner.step({1: 7})
    before = values[3].clone()
    runner.add(4, params([3, 0]), prompt=6, prefill=8)  # preempted with two tokens, in another slot now
    runner.step({4: 7})
    assert torch.equal(values[3, :2], before[:2]), "a piece that ends behind the prompt"
    assert torch.isnan(values[3, 2:]).all()
    made, logprobs = runner.step({4: 8})
    assert float(values[3, 2]) == pytest.approx(float(logprobs[0, made[0]]), abs=1e-6)
    assert torch.equal(values[3, :2], before[:2])


@both
def test_other_requests_and_padding_write_to_no_row_of_a_request(kind: type[FakeSampler]) -> None:
    runner, values = recording(kind)
    runner.add(0, params([1, 0]), prompt=3)
    runner.add(2, params(None), prompt=3)
    runner.step({0: 3, 2: 3}, padding=2)
    assert values[1, 0].isfinite()
    assert values[:ROWS].isfinite().sum() == 1
    runner.add(0, params(None), prompt=3)  # the slot's next request has no row
    runner.step({0: 4})
    assert values[:ROWS].isfinite().sum() == 1
    runner.add(0, params([1, 0]), prompt=3)
    runner.step({0: 3 + 2 * ROOM})  # a step ahead of a request that has ended
    assert values[1].isfinite().sum() == 2


def test_nothing_waits_for_the_gpu() -> None:
    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    runner, _ = recording(FakeSampler)
    called: list[str] = []
    with Recorder():  # type: ignore[no-untyped-call]
        runner.add(0, params([1, 0]), prompt=3)
        runner.step({0: 3})
    assert any("index_put" in name for name in called)
    assert not [n for n in called if "_local_scalar_dense" in n or "nonzero" in n or "masked_select" in n]


def test_another_model_runner_keeps_its_sampler() -> None:
    class Called(FakeSampler):
        def __call__(self, logits: Any, input_batch: Any, mask: Any = None) -> Any: ...  # type: ignore[override]

    class Added(FakeSampler):
        def add_request(self, req_idx: int, sampling_params: Any, more: Any = None) -> None: ...

    assert "not the runner" in why_not(SimpleNamespace(sampler=object()))
    speculative = FakeRunner(FakeSampler)
    speculative.rejection_sampler = object()  # type: ignore[assignment]
    assert "speculative" in why_not(speculative)
    assert "mask" in why_not(FakeRunner(Called))
    assert "takes requests as" in why_not(FakeRunner(Added))
    elsewhere = FakeRunner(FakeSampler)
    del elsewhere.req_states.prefill_len
    assert "no prefill_len" in why_not(elsewhere)


def test_what_is_written_must_arrive() -> None:
    board = torch.zeros(2, 2)
    assert arrives(board, board)
    assert not arrives(board.clone(), torch.zeros(2, 2))


class FakeCuda(TorchDispatchMode):
    """Registering host memory returns `code`; like CUDA, the next operation after a failure raises its error, once."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self._code, self._left = code, False

    def cudaHostRegister(self, *memory: int) -> int:
        self._left = self._code != 0
        return self._code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left and "is_pinned" not in str(func):
            self._left = False
            raise RuntimeError("CUDA error: invalid argument")
        return True if "is_pinned" in str(func) else func(*args, **(kwargs or {}))


def installed(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: FakeCuda) -> str:
    def refused(board: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no device pointer")

    views, logprobs = ModuleType("torch_utils"), ModuleType("logprob")
    views.get_accelerator_view_from_cpu_tensor = refused  # type: ignore[attr-defined]
    logprobs.compute_token_logprobs = of_sampled  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu", "vllm.v1.worker.gpu.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.utils.torch_utils", views)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.logprob", logprobs)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    np.zeros((ROWS + 1, ROOM), np.float32).tofile(folder / "board")
    runner.device = torch.device("cpu")  # type: ignore[attr-defined]
    return install(runner, folder / "board", ROWS, ROOM)


def test_a_gpu_that_cannot_use_host_memory_computes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine reports logprobs itself then; CUDA's error stayed, and the next kernel raised it."""
    runner = FakeRunner(FakeSampler)
    with FakeCuda(1) as cuda:
        assert "cudaHostRegister: 1" in installed(runner, monkeypatch, tmp_path, cuda)
        assert torch.zeros(1).item() == 0.0


def test_a_view_that_the_gpu_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert "no device pointer" in installed(FakeRunner(FakeSampler), monkeypatch, tmp_path, FakeCuda(0))


def test_a_logprob_that_was_not_written_is_an_error_and_no_number(tmp_path: Path) -> None:
    """A row's former values would pass for logprobs."""

    async def taken() -> tuple[LogprobBoard, int]:
        board = LogprobBoard(tmp_path / "board", 1, 4)
        np.memmap(board.path, np.float32, "r+", shape=(2, 4))[0] = -0.5
        return board, await board.acquire(3)

    board, row = asyncio.run(taken())
    np.memmap(board.path, np.float32, "r+", shape=(2, 4))[0, 0] = -1.0
    ended: Any = SimpleNamespace()
    request = Request(ended, token_ids=[5, 6])
    with pytest.raises(EngineDied, match=r"1 of 2 sampled tokens have no logprob.*record false"):
        _generation(request, "stop", 0, board.read(row, 2))
    assert _generation(Request(ended, token_ids=[5]), "stop", 0, board.read(row, 1)).logprobs.tolist() == [-1.0]
