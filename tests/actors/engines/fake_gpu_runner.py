"""A fake of vLLM's model runner for GPUs, on a CPU: what gpu_sampler.py uses, in the signatures of 0.24 and 0.32.

Its sampler draws from the softmax of logits / temperature, as vLLM's kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SLOTS, VOCABULARY = 6, 11


@dataclass
class FakeBatch:
    """vllm.v1.worker.gpu.input_batch.InputBatch"""

    expanded_idx_mapping: Tensor
    """[B] int32"""
    positions: Tensor
    logits_indices: Tensor


class FakeStates:
    """vllm.v1.worker.gpu.states.RequestState"""

    def __init__(self) -> None:
        self.max_num_reqs = SLOTS
        self.prompt_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.prefill_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))


class FakeSampler:
    """vllm.v1.worker.gpu.sample.sampler.Sampler of 0.32."""

    def __init__(self, states: FakeStates) -> None:
        self.req_states = states
        self.temperature = torch.ones(SLOTS)
        self.use_flashinfer = True
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, logits: Tensor, input_batch: FakeBatch) -> Any:
        b = input_batch
        sampled, _ = self.sample(logits, b.expanded_idx_mapping, b.expanded_idx_mapping, None, b.positions)
        return SimpleNamespace(sampled_token_ids=sampled.view(-1, 1))

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        self.temperature[req_idx] = sampling_params.temperature

    def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        processed = logits / self.temperature[expanded_idx_mapping.clamp(min=0).long()][:, None]
        return torch.multinomial(processed.softmax(-1), 1, generator=self.generator)[:, 0], processed


class FakeSampler024(FakeSampler):
    """The same of 0.24."""

    def __call__(self, logits: Tensor, input_batch: FakeBatch) -> Any:
        b = input_batch
        sampled, _ = self.sample(logits, b.expanded_idx_mapping, None, b.positions, return_logprobs=False)
        return SimpleNamespace(sampled_token_ids=sampled.view(-1, 1))

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:  # type: ignore[override]
        super().add_request(req_idx, sampling_params)

    def sample(self, logits: Tensor, expanded_idx_mapping: Tensor, *others: Any, **_: Any) -> tuple[Tensor, Tensor]:
        return super().sample(logits, expanded_idx_mapping, *others)


class FakeRunner:
    """vllm.v1.worker.gpu.model_runner.GPUModelRunner"""

    rejection_sampler = None

    def __init__(self, kind: type[FakeSampler]) -> None:
        self.device = torch.device("cpu")
        self.req_states = FakeStates()
        self.sampler: Any = kind(self.req_states)
        self._logits = torch.Generator().manual_seed(1)

    def add(self, slot: int, params: Any, prompt: int, prefill: int | None = None) -> None:
        """`prefill`: tokens to compute before sampling: after a preemption more than the prompt."""
        self.req_states.prompt_len.gpu[slot] = prompt
        self.req_states.prefill_len.gpu[slot] = prefill or prompt
        given = (prompt, params) if isinstance(self.sampler, FakeSampler024) else (params,)
        self.sampler.add_request(slot, *given)

    def step(self, lengths: dict[int, int], padding: int = 0) -> tuple[Tensor, Tensor]:
        """`lengths`: slot -> tokens that it has after this step, before the new one. Returns the sampled tokens [B] and
        the logprobs of the whole vocabulary [B, V] that each was drawn from."""
        slots = torch.tensor([*lengths, *[-1] * padding], dtype=torch.int32)
        last = torch.tensor([*lengths.values(), *[1] * padding]) - 1
        # Every request has two tokens in the step, of which the second one is the last.
        positions = torch.stack([last - 1, last], 1).flatten()
        batch = FakeBatch(slots, positions, torch.arange(len(slots)) * 2 + 1)
        logits = torch.randn(len(slots), VOCABULARY, generator=self._logits)
        made = self.sampler(logits, batch).sampled_token_ids[:, 0]
        return made, (logits / self.sampler.temperature[slots.clamp(min=0).long()][:, None]).log_softmax(-1)


def of_sampled(logits: Tensor, token_ids: Tensor) -> Tensor:
    """In place of vLLM's kernel compute_token_logprobs."""
    return logits.float().log_softmax(-1).gather(1, token_ids)


def params(row: Sequence[int] | None, temperature: float = 1.0) -> Any:
    """`row`: [row, seed], as asyncrl sends them."""
    from asyncrl.actors.engines.vllm.logprob_board import EXTRA

    return SimpleNamespace(temperature=temperature, extra_args={EXTRA: list(row)} if row else None)
