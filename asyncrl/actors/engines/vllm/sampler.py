"""asyncrl's sampler in vLLM's worker on a CPU: reproducible seeds, and logprobs without vLLM's cost per token.

To report the logprob of a sampled token, vLLM ranks it in the vocabulary, sends three arrays per request and step
through two processes, and keeps Python objects per token. Here the logprob, which sampling computes anyway, is gathered
once and written to shared memory (logprob_board.py). The k-th token of a request depends on (seed, k) alone, by the
same function as in the embedded engine; on a CPU, vLLM's own seeded requests end its engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from asyncrl.actors.engines.sampling import sample, truncate, uniforms
from asyncrl.actors.engines.vllm.logprob_board import EXTRA

GREEDY = 1e-5
"""vLLM treats a request with a lower temperature as greedy."""


class RecordingSampler(Sampler):  # type: ignore[misc]
    """Replaces the model runner's sampler. vLLM samples a batch in which any request has no row on the board."""

    def __init__(self, runner: Any, path: Path, rows: int, room: int) -> None:
        super().__init__("processed_logprobs")
        self._runner = runner
        self._board = np.memmap(path, np.float32, "r+", shape=(rows, room)).view(np.ndarray)
        self._noise = np.zeros((rows, room))
        self._drawn: dict[str, int] = {}
        """Request -> its row; the row's noise has been drawn."""
        self._batch: Any = None
        """vLLM creates a new one whenever a request joins, leaves or moves."""
        self._rows = np.zeros(0, np.int64)
        self._prompts = np.zeros(0, np.int64)
        self._complete = False

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """logits [B, V], in the order of the runner's batch."""
        if sampling_metadata is not self._batch:
            self._look_up(sampling_metadata)
        if not self._complete:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        logits = logits.float()
        temperature, greedy = sampling_metadata.temperature, None
        if temperature is None:
            temperature, greedy = torch.ones(len(logits)), torch.ones(len(logits), dtype=torch.bool)
        elif not sampling_metadata.all_random:
            greedy = temperature < GREEDY
            temperature = temperature.masked_fill(greedy, 1.0)
        top_p, top_k = sampling_metadata.top_p, sampling_metadata.top_k
        if top_p is not None or top_k is not None:
            top_p = torch.ones(len(logits)) if top_p is None else top_p
            # vLLM writes `off` as the size of the vocabulary.
            top_k = torch.zeros(len(logits), dtype=torch.int64) if top_k is None else top_k
            logits = truncate(logits, temperature, top_p, top_k)
        at = self._runner.input_batch.num_tokens_no_spec[: len(logits)] - self._prompts
        tokens, logprobs = sample(logits, torch.from_numpy(self._noise[self._rows, at]), temperature, greedy)
        self._board[self._rows, at] = logprobs.numpy()
        return SamplerOutput(sampled_token_ids=tokens.int()[:, None], logprobs_tensors=None)

    def _look_up(self, batch: Any) -> None:
        self._batch = batch
        runner = self._runner
        drawn: dict[str, int] = {}
        for name in runner.input_batch.req_ids:
            row = self._drawn.get(name)
            if row is None:
                extra = (runner.requests[name].sampling_params.extra_args or {}).get(EXTRA)
                if extra is None:
                    self._complete, self._drawn = False, {}
                    return
                row, seed = extra
                self._noise[row] = uniforms(seed, self._noise.shape[1])
            drawn[name] = row
        self._complete, self._drawn = True, drawn
        self._rows = np.fromiter(drawn.values(), np.int64, len(drawn))
        self._prompts = runner.input_batch.num_prompt_tokens[: len(drawn)].copy()


def install(runner: Any, path: Path, rows: int, room: int) -> bool:
    """Install the sampler, if the model runner is one that this file supports: on a CPU, one token per step. The board
    has one row more, which gpu_sampler.py needs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if type(runner) is not CPUModelRunner or runner.use_async_scheduling or runner.speculative_config is not None:
        return False
    runner.sampler = RecordingSampler(runner, path, rows, room)
    return True
