"""Requests to vLLM's engine core, and what comes back of them: token ids in, token ids out.

    send ──a copy of one that vLLM has checked, with this prompt──> client ══zmq══> scheduler
    over <──the last token── collect <──────────────────────────── client <══zmq══ once per step: all new tokens

AsyncLLM's own way checks and clones the parameters of every request, gives it a generator, a queue, a detokenizer, and
looks at all of these in each step: with calls of a few tokens that was a sixth of what the actor's process did.

Used of vLLM, the same in 0.24 and 0.32: `input_processor.process_inputs` and, of `engine_core`, `add_request_async`,
`abort_requests_async`, `get_output_async`. 0.24's outputs have no `weight_version`.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.actors.engines.protocol import EngineDied, Sampling
from asyncrl.actors.engines.vllm.logprob_board import EXTRA
from asyncrl.trajectory import Float32

log = logging.getLogger(__name__)

DIED = "vLLM's engine ended; its log says why"


@dataclass(slots=True, eq=False)
class Request:
    """One that is under way."""

    over: asyncio.Future[str]
    """Why it ended: vLLM's finish reason."""
    id: str = ""
    """Its name at vLLM; none while it was not sent."""
    token_ids: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[Float32] = field(default_factory=list)
    """Of them, where vLLM was asked for them: an array per step."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(the first token, its version), wherever that changes; empty where vLLM does not say."""

    def end(self, reason: str | Exception) -> None:
        if self.over.done():
            return
        if isinstance(reason, str):
            self.over.set_result(reason)
        else:
            self.over.set_exception(reason)


@dataclass(slots=True)
class Counts:
    """What the engine has done since its start, and how it stands."""

    waiting: int = 0
    """Requests that no step has computed yet."""
    kv_use: float = 0.0
    """Share of 1."""
    generated: int = 0
    """Tokens."""
    prefilled: int = 0
    prefix_reused: int = 0
    preempted: int = 0
    """Requests."""


class Requests:
    """The only one who sends requests to this engine core, and reads what it puts out."""

    def __init__(self, llm: Any, tasks: Any, *, room: int, seeds: bool) -> None:
        """
        Args:
            llm: an AsyncLLM that has served no request yet. From now on it counts as dead when the core is.
            tasks: its `get_supported_tasks`.
            room: tokens of a row, prompt and answer.
            seeds: whether vLLM is told the seed of a request whose logprobs it reports itself.
        """
        self.counts = Counts()
        self._core, self._input, self._tasks = llm.engine_core, llm.input_processor, tasks
        self._room, self._seeds = room, seeds
        self._sent: dict[str, Request] = {}
        # A name never comes again: vLLM may look for an earlier bearer of it late.
        self._names = map(str, itertools.count())
        self._common: Callable[..., Any] = lru_cache(maxsize=64)(self._checked)
        llm.output_handler = asyncio.create_task(self._collect(), name="vllm-outputs")

    async def send(self, request: Request, prompt: list[int], sampling: Sampling, salt: str, row: int | None) -> None:
        """`salt`: requests of the same one share cached prefixes. `row`: of the board, for its logprobs; None: they are
        vLLM's own. Raises EngineDied."""
        from vllm.v1.engine.exceptions import EngineDeadError

        s = sampling
        asked = copy.copy(self._common(s.temperature, s.top_p, s.top_k, s.stop_token_ids, row is None))
        params = asked.sampling_params = copy.copy(asked.sampling_params)
        params.max_tokens = min(s.max_new_tokens, self._room - len(prompt))
        if row is not None:
            params.extra_args = {EXTRA: [row, s.seed % 2**63]}
        elif self._seeds:
            params.seed = s.seed % 2**63
        asked.request_id = request.id = next(self._names)
        asked.prompt_token_ids, asked.cache_salt, asked.arrival_time = prompt, salt, time.time()
        self._sent[request.id] = request
        try:
            await self._core.add_request_async(asked)
        except EngineDeadError as error:
            self._sent.pop(request.id, None)
            raise EngineDied(DIED) from error

    async def abort(self, request: Request) -> None:
        if self._sent.pop(request.id, None) is not None:
            await self._core.abort_requests_async([request.id])
        request.end("abort")

    def _checked(
        self, temperature: float, top_p: float, top_k: int, stop_token_ids: tuple[int, ...], logprobs: bool
    ) -> Any:
        """What requests have in common, as an EngineCoreRequest: checking it takes longer than copying it."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
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
        """Of one step."""
        counts, sent = self.counts, self._sent
        version = getattr(outputs, "weight_version", None)
        for output in outputs.outputs:
            new = output.new_token_ids
            counts.generated += len(new)
            if (stats := output.prefill_stats) is not None:
                counts.prefilled += stats.num_computed_tokens
                counts.prefix_reused += stats.num_cached_tokens
            if output.events:
                counts.preempted += sum(event.type.name == "PREEMPTED" for event in output.events)
            request = sent.get(output.request_id)
            if request is None:
                continue  # it was aborted
            if new and version is not None and (not request.versions or request.versions[-1][1] != int(version)):
                request.versions.append((len(request.token_ids), int(version)))
            request.token_ids += new
            if output.new_logprobs is not None:
                request.logprobs.append(np.asarray(output.new_logprobs.logprobs, np.float32)[:, 0])
            if output.finish_reason is not None:
                del sent[request.id]
                request.end(str(output.finish_reason))
        if outputs.scheduler_stats is not None:
            counts.waiting = outputs.scheduler_stats.num_waiting_reqs
            counts.kv_use = outputs.scheduler_stats.kv_cache_usage
