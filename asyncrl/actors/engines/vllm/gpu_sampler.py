"""Behaviour logprobs in vLLM's worker on a GPU, without vLLM's cost per token and without a copy per step.

vLLM's own sampler samples, with its seeds. The logprob of the sampled token is gathered on the GPU and written by the
GPU into the board (logprob_board.py), host memory that it sees as its own, [rows, room]; vLLM keeps the ids of running
requests in such memory too. The host waits no longer than before: when the token of a step reaches it, the
step's kernels are done, and so is the write.

The two versions of vLLM that are supported, 0.24 and 0.32, have the same model runner for GPUs (`v1/worker/gpu`) in all
that is used here. `why_not` says what it must have; with anything else vLLM reports logprobs itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.actors.engines.vllm.logprob_board import EXTRA

OfSampled = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, V], token ids [B, 1]) -> logprobs [B, 1] float32."""


class Recording:
    """Mixed in before the sampler of vLLM's model runner, and records what that samples.

    A slot is the runner's index of a running request, a row is one of the board. The last row takes unwanted
    values: of requests without a row, and of unfinished prefills, whose tokens the runner throws away.
    """

    req_states: Any
    _values: Tensor
    """[rows + 1, room] float32"""
    _row_of: Tensor
    """[slots] int64"""
    _of_sampled: OfSampled
    _batch: Any = None

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        self._batch = input_batch
        return super().__call__(logits, input_batch)  # type: ignore[misc]

    def add_request(self, slot: int, *given: Any) -> None:
        """`given` ends with the request's SamplingParams; vLLM 0.24 has the prompt's length before them."""
        super().add_request(slot, *given)  # type: ignore[misc]
        extra = (given[-1].extra_args or {}).get(EXTRA)
        row = len(self._values) - 1 if extra is None else extra[0]
        self._row_of[slot : slot + 1].fill_(row)  # asynchronous: queued behind the GPU's earlier kernels

    def sample(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Sampled tokens [B] and the logits [B, V] that they were drawn from."""
        sampled, logits = super().sample(*given, **options)  # type: ignore[misc]
        batch, states = self._batch, self.req_states
        slots = batch.expanded_idx_mapping
        known = slots.clamp(min=0).long()  # below 0: padding
        length = batch.positions[batch.logits_indices] + 1
        """Length of each request before its new token."""
        kept = (slots >= 0) & (length >= states.prefill_len.gpu[known])
        spare, room = len(self._values) - 1, self._values.shape[1]
        rows = torch.where(kept, self._row_of[known], spare)
        at = (length - states.prompt_len.gpu[known]).clamp(0, room - 1).long()
        self._values.index_put_((rows, at), self._of_sampled(logits, sampled.view(-1, 1))[:, 0])
        return sampled, logits


def why_not(runner: Any) -> str:
    """What of the model runner differs from what this file was written for; empty: nothing."""
    sampler, states = getattr(runner, "sampler", None), getattr(runner, "req_states", None)
    if sampler is None or states is None:
        return "it is not the runner of vllm.v1.worker.gpu, or has no sampler"
    if getattr(runner, "rejection_sampler", None) is not None:
        return "it samples several tokens in a step (speculative decoding)"
    if missing := [name for name in ("prompt_len", "prefill_len") if not hasattr(getattr(states, name, None), "gpu")]:
        return f"its requests have no {missing[0]} on the GPU"
    kind = type(sampler)
    called, added = inspect.signature(kind.__call__), inspect.signature(kind.add_request)
    if [*called.parameters] != ["self", "logits", "input_batch"]:
        return f"its sampler is called with {called}"
    if [*added.parameters][-1] != "sampling_params":
        return f"its sampler takes requests as {added}"
    if not callable(getattr(kind, "sample", None)):
        return "its sampler has no method sample"
    return ""


def record(runner: Any, values: Tensor, of_sampled: OfSampled) -> None:
    """Replace the runner's sampler, which must pass `why_not`, by one that records into `values` [rows + 1, room]."""
    before = runner.sampler
    kind: Any = type("RecordingSampler", (Recording, type(before)), {})
    made = kind.__new__(kind)
    made.__dict__.update(vars(before))
    slots = before.req_states.max_num_reqs
    made._values, made._of_sampled = values, of_sampled
    made._row_of = torch.full((slots,), len(values) - 1, dtype=torch.int64, device=values.device)
    # Fused kernels return logits from before top-k and top-p.
    made.use_flashinfer = False
    runner.sampler = made


def install(runner: Any, path: Path, rows: int, room: int) -> str:
    """Install the recorder for the board at `path`, [rows + 1, room]. Returns why not, or nothing."""
    if why := why_not(runner):
        return why
    try:
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
    except ImportError as error:
        return str(error)
    board = torch.from_numpy(np.memmap(path, np.float32, "r+", shape=(rows + 1, room)))
    code = torch.cuda.cudart().cudaHostRegister(board.data_ptr(), board.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(code) or not board.is_pinned():
        _forget_error(runner.device)
        return f"the GPU cannot use {board.nbytes} bytes of host memory (cudaHostRegister: {int(code)})"
    try:
        values: Tensor = get_accelerator_view_from_cpu_tensor(board)
    except RuntimeError as error:
        return f"the GPU cannot use {board.nbytes} bytes of host memory: {error}"
    if not arrives(values, board):
        return "what the GPU writes does not arrive in host memory"
    record(runner, values, compute_token_logprobs)
    return ""


def _forget_error(device: torch.device) -> None:
    """Takes CUDA's last error, which the failed call leaves behind and the next check of a kernel would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def arrives(values: Tensor, board: Tensor) -> bool:
    """Whether `board` holds what is written to `values`: tried with the last value of the spare row."""
    values[-1, -1:].fill_(-1.0)
    if values.device.type != "cpu":
        torch.accelerator.synchronize(values.device)
    return float(board[-1, -1]) == -1.0
