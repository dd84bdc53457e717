"""Requests to vLLM's engine core, and its outputs: token ids in, token ids out.

    send ──a copy of a request that vLLM has checked, with this prompt──> client ══zmq══> scheduler
    ended <──the last token── collect <───────────────────────────────── client <══zmq══ once per step: all new tokens

AsyncLLM checks and clones the parameters of every request, gives it a generator, a queue and a detokenizer, and visits
all of these in each step: with requests of a few tokens that took a sixth of the actor process's time.

The parts of vLLM used here are the same in 0.24 and 0.32: `input_processor.process_inputs` and, of `engine_core`,
`add_request_async`, `abort_requests_async`, `get_output_async`. Outputs of 0.24 have no `weight_version`.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.actors.engines.protocol import EngineDied, Sampling
from asyncrl.actors.engines.vllm.logprob_board import EXTRA
from asyncrl.trajectory import Float32, Int32

log = logging.getLogger(__name__)

DIED = "vLLM's engine ended; its log says why"
GREEDY_WITH_MASKS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0}
"""The greedy token, asked for as vLLM takes it under `return_sampling_mask`, which refuses temperature 0. The logprob
is then 0, unless several tokens share the largest logit: one of them is sampled."""


@dataclass(slots=True, eq=False)
class Request:
    """A running request."""

    ended: asyncio.Future[str]
    """vLLM's finish reason."""
    id: str = ""
    """vLLM's name for it; empty until it is sent."""
    token_ids: list[int] = field(default_factory=list)
    """Tokens sampled so far."""
    logprobs: list[Float32] = field(default_factory=list)
    """Their logprobs, an array per step; empty unless vLLM was asked for them."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first token, its version) wherever the version changes; empty where vLLM reports none."""
    began: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    """Seconds until the first token; None while there is none."""
    prefilled: int = 0
    """Tokens that vLLM has computed before sampling."""
    max_kept: int = 0
    """Above 0: the kept ids of each token are wanted, up to so many."""
    kept: list[Int32] = field(default_factory=list)
    """Kept ids of each token, if they are recorded."""

    @property
    def cost(self) -> tuple[float | None, int]:
        """`queue_s` and `prefilled` of the generation."""
        return self.queue_s, self.prefilled

    def take(self, output: Any, version: Any) -> None:
        """Take the new tokens of one step; `version` is None where vLLM reports none."""
        new = output.new_token_ids
        if new and self.queue_s is None:
            self.queue_s = time.monotonic() - self.began
        if output.prefill_stats is not None:
            self.prefilled += output.prefill_stats.num_computed_tokens
        if new and version is not None and (not self.versions or self.versions[-1][1] != int(version)):
            self.versions.append((len(self.token_ids), int(version)))
        self.token_ids += new
        if self.max_kept and new and (mask := getattr(output, "new_sampling_mask", None)) is not None:
            ends = (len(mask.token_ids),) if mask.offsets is None else mask.offsets[1:].tolist()
            self.kept += [mask.token_ids[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]
        if output.new_logprobs is not None:
            self.logprobs.append(np.asarray(output.new_logprobs.logprobs, np.float32)[:, 0])

    def end(self, reason: str | Exception) -> None:
        if self.ended.done():
            return
        if isinstance(reason, str):
            self.ended.set_result(reason)
        else:
            self.ended.set_exception(reason)


@dataclass(slots=True)
class EngineCounts:
    """The engine's load, and its totals since the start."""

    waiting: int = 0
    """Requests that no step has computed yet."""
    kv_use: float = 0.0
    """Share of 1."""
    generated: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Tokens computed before sampling."""
    prefix_reused: int = 0
    """Tokens taken from the prefix cache."""
    preempted: int = 0
    """Preemptions of requests."""

    def add(self, output: Any) -> None:
        """Add what one request did in one step."""
        self.generated += len(output.new_token_ids)
        if (stats := output.prefill_stats) is not None:
            self.prefilled += stats.num_computed_tokens
            self.prefix_reused += stats.num_cached_tokens
        if output.events:
            self.preempted += sum(event.type.name == "PREEMPTED" for event in output.events)


class Requests:
    """Sends all requests to this engine core, and reads all its outputs."""

    def __init__(self, llm: Any, tasks: Any, *, room: int, seeds: bool, masks: bool = False) -> None:
        """
        Args:
            llm: an AsyncLLM that has served no request yet. From now on it counts as dead when the core is dead.
            tasks: the result of its `get_supported_tasks`.
            room: tokens of a row, prompt and output together.
            seeds: whether requests carry their seed for vLLM's own sampler.
            masks: whether the core returns the kept ids of every token (`return_sampling_mask`).
        """
        self.counts = EngineCounts()
        self._core, self._input, self._tasks = llm.engine_core, llm.input_processor, tasks
        self._room, self._seeds, self._masks = room, seeds, masks
        self._sent: dict[str, Request] = {}
        # No name is used twice: vLLM may still refer to an earlier request of that name.
        self._names = map(str, itertools.count())
        self._common: Callable[..., Any] = lru_cache(maxsize=64)(self._checked)
        llm.output_handler = asyncio.create_task(self._collect(), name="vllm-outputs")

    async def send(self, request: Request, prompt: list[int], sampling: Sampling, salt: str, row: int | None) -> None:
        """`salt`: requests with the same salt share cached prefixes. `row`: its row on the board, for its logprobs;
        None: vLLM reports them. Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        s = sampling if sampling.temperature or not self._masks else replace(sampling, **GREEDY_WITH_MASKS)
        request.max_kept = s.max_kept
        sent = copy.copy(self._common(s.temperature, (s.top_p, s.top_k, s.min_p), s.stop_token_ids, row is None))
        params = sent.sampling_params = copy.copy(sent.sampling_params)
        params.max_tokens = min(s.max_new_tokens, self._room - len(prompt))
        if row is not None:
            params.extra_args = {EXTRA: [row, s.seed % 2**63]}
        if self._seeds:
            params.seed = s.seed % 2**63
        sent.request_id = request.id = next(self._names)
        sent.prompt_token_ids, sent.cache_salt, sent.arrival_time = prompt, salt, time.time()
        self._sent[request.id] = request
        try:
            await self._core.add_request_async(sent)
        except EngineDeadError as error:
            self._sent.pop(request.id, None)
            raise EngineDied(DIED) from error

    async def abort(self, request: Request) -> None:
        if self._sent.pop(request.id, None) is not None:
            await self._core.abort_requests_async([request.id])
        request.end("abort")

    def _checked(
        self,
        temperature: float,
        truncation: tuple[float, int, float],
        stop_token_ids: tuple[int, ...],
        logprobs: bool,
    ) -> Any:
        """An EngineCoreRequest with these parameters, checked by vLLM; checking takes longer than copying."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        top_p, top_k, min_p = truncation
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,
            logprobs=0 if logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._input.process_inputs("", tokens_input([0]), params, supported_tasks=self._tasks)

    async def _collect(self) -> None:
        try:
            while True:
                self._take(await self._core.get_output_async())
        except Exception as error:
            log.error("vLLM's engine ended: %s", error)
            for request in self._sent.values():
                request.end(EngineDied(DIED))
            self._sent.clear()

    def _take(self, outputs: Any) -> None:
        """Take the outputs of one step."""
        counts, sent = self.counts, self._sent
        version = getattr(outputs, "weight_version", None)
        for output in outputs.outputs:
            counts.add(output)
            request = sent.get(output.request_id)
            if request is None:
                continue  # it was aborted
            request.take(output, version)
            if output.finish_reason is not None:
                del sent[request.id]
                request.end(str(output.finish_reason))
        if outputs.scheduler_stats is not None:
            counts.waiting = outputs.scheduler_stats.num_waiting_reqs
            counts.kv_use = outputs.scheduler_stats.kv_cache_usage
