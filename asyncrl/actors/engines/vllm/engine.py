"""vLLM as the engine: its AsyncLLM in this process, its engine core in a child process.

    this process                                    vLLM's engine core (ends with this process: executors.py)
    generate ──token ids──> requests.py ───────zmq──> scheduler ──> model runner, sampler
    abort ─────────────────────────┘    <──ids, versions, of all requests, once per step──┘
    pause, resume ──────────> scheduler, between two steps
    load ──path of a file──────────────────────────────────> worker maps it (worker.py)

Requests survive a pause. While paused, new requests wait here, so that they are computed with the new weights only.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from asyncrl.actors.engines.checks import Fit, checkpoint_shapes, prompt_of
from asyncrl.actors.engines.protocol import EngineDied, Generation, Sampling
from asyncrl.actors.engines.vllm.logprob_board import LogprobBoard
from asyncrl.actors.engines.vllm.process import end_vllm, start_vllm
from asyncrl.actors.engines.vllm.requests import EngineCounts, Request, Requests
from asyncrl.actors.engines.vllm.settings import (
    VLLMSettings,
    gpu_bytes,
    kv_gb,
    names_versions,
    on_cpu,
    require_masks,
    require_versions,
    require_vllm,
    seeds_in_kernel,
    shared_kv_gb,
    wants_masks,
)
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.process import leftovers
from asyncrl.process.gpus import shared
from asyncrl.trajectory import Float32
from asyncrl.trajectory.kept_ids import kept_ids
from asyncrl.weights.channels import ON_DEVICE
from asyncrl.weights.device.subscriber import LeasedWeights

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Weights

Result = TypeVar("Result")


def from_config(
    config: Config,
    *,
    kv_gb: float | None = None,
    gpu_memory: float = 0.9,
    tensor_parallel: int = 1,
    eager: bool | None = None,
    record: bool = True,
    args: dict[str, Any] | None = None,
) -> VLLMEngine:
    """`actors.engine: vllm`; VLLMSettings documents the options. Raises ConfigError, also when vLLM is missing."""
    from asyncrl.model import resolve_path

    require_vllm()
    require_versions(config.weights.drain)
    require_masks(config)
    # Two actors must not draw the same samples for the prompts of one group.
    seed = zlib.crc32(f"{config.actors.seed}/{os.environ.get('ASYNCRL_ROLE', '')}".encode())
    settings = VLLMSettings(
        model=resolve_path(config.model),
        dtype=config.model.dtype,
        slots=config.actors.most_slots,
        max_tokens=config.env.max_tokens,
        seed=seed,
        threads=config.actors.threads,
        kv_gb=kv_gb,
        gpu_memory=gpu_memory,
        tensor_parallel=tensor_parallel,
        eager=eager,
        record=record,
        start_s=config.launch.start_s,
        transfer=config.weights.channel in ON_DEVICE,
        masks=wants_masks(config),
        args=args or {},
    )
    return VLLMEngine(settings)


class VLLMEngine:
    def __init__(self, settings: VLLMSettings) -> None:
        """Raises ConfigError when vLLM is missing, or the model has too few positions for `env.max_tokens`."""
        require_vllm()
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(settings.model).get_text_config()
        positions = getattr(model, "max_position_embeddings", settings.max_tokens)
        if settings.max_tokens > positions:
            raise ConfigError(
                f"env.max_tokens is {settings.max_tokens} but the model has {positions} positions: lower it."
            )
        self.held_version = (0, 0)
        self._cpu, self._seeds = on_cpu(), False
        if self._cpu and settings.kv_gb is None:
            settings = replace(settings, kv_gb=kv_gb(settings, model))
        elif shared() and settings.kv_gb is None:
            settings = replace(settings, kv_gb=shared_kv_gb(settings, checkpoint_shapes(settings.model), gpu_bytes()))
        self._settings = settings
        self._vocab = int(model.vocab_size)
        optional = ("lm_head.weight",) if getattr(model, "tie_word_embeddings", False) else ()
        self._fit = Fit(checkpoint_shapes(settings.model), optional)
        self._llm: Any = None
        self._board: LogprobBoard | None = None
        self._requests: Requests | None = None
        self._running: dict[str, Request] = {}
        self._open = asyncio.Event()
        self._paused_at: float | None = None
        self._paused_s = 0.0

    @property
    def honours_seeds(self) -> bool:
        """Whether equal seeds give equal tokens. On a CPU only with asyncrl's sampler: vLLM gets no seed there, since
        it dies when a seeded prompt is prefilled in two pieces (set_offset of a CPU generator). On a GPU only if the
        model runner's kernel takes seeds, instead of a generator for each request."""
        return (self._cpu and self._board is not None) or self._seeds

    async def start(self) -> None:
        """Returns when vLLM serves. Raises ConfigError for arguments that it refuses, EngineDied when it fails."""
        try:
            await asyncio.to_thread(self._build)
            self._seeds = not self._cpu and seeds_in_kernel(self._llm.vllm_config)
            tasks = await self._command("get_supported_tasks", self._llm.get_supported_tasks())
            room, masks = self._settings.max_tokens, self._settings.masks
            self._requests = Requests(self._llm, tasks, room=room, seeds=self._seeds, masks=masks)
            await self._name_version()
            if self._settings.record:
                await self._record()
        except BaseException:
            await self.close()
            raise
        self._open.set()

    def _build(self) -> None:
        # Kept in no local variable: vLLM keeps frames alive, and its destructor fails at interpreter exit.
        self._llm = start_vllm(self._settings, self._cpu)

    async def _record(self) -> None:
        # Removed as soon as both processes have mapped it, so that nothing is left, however they end.
        with leftovers.in_memory("vllm") as folder:
            # Twice as many rows as slots, so that a request always waits to fill a free slot of vLLM.
            board = LogprobBoard(folder / "logprobs", 2 * self._settings.slots, self._settings.max_tokens)
            if all(await self._in_worker("asyncrl_record", str(board.path), board.rows, board.room)):
                self._board = board

    async def close(self) -> None:
        for name, request in self._running.items():
            request.end(EngineDied(f"request {name}: the engine was closed"))
        self._open.set()
        llm, self._llm = self._llm, None
        if llm is not None:
            await end_vllm(llm)
            del llm
            gc.collect()

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        requests = self._check_alive()
        room = self._settings.max_tokens
        ids = prompt_of(request, prompt, sampling, vocab=self._vocab, room=room, running=self._running)
        mine = self._running[request] = Request(asyncio.get_running_loop().create_future())
        board = self._board
        row = None
        try:
            row = await board.acquire(sampling.max_new_tokens) if board else None
            while not self._open.is_set():
                await self._open.wait()
            held = self.held_version
            if not mine.ended.done():
                # Salted by the weights, so that no prefix is used that older weights computed for running requests.
                await requests.send(mine, ids.tolist(), sampling, f"{held[0]}.{held[1]}", row)
            reason = await mine.ended
            recorded = board.read(row, len(mine.token_ids)) if board and row is not None else None
            return _generation(mine, reason, held[1], recorded)
        except asyncio.CancelledError:
            await requests.abort(mine)
            raise
        finally:
            del self._running[request]
            if board and row is not None:
                board.release(row)

    async def abort(self, request: str) -> None:
        if request in self._running and self._requests is not None:
            await self._requests.abort(self._running[request])

    async def check(self, weights: Weights) -> None:
        if isinstance(weights, LeasedWeights):
            from asyncrl.actors.engines.vllm.transfer import meet

            self._fit.shapes(weights)
            await meet(self._llm, weights, self._settings.tensor_parallel, self._command)
            return
        await asyncio.to_thread(self._fit.tensors, weights)

    async def pause(self, recompute_kv: bool) -> None:
        self._check_alive()
        self._open.clear()
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        # Not AsyncLLM.pause_generation, which also clears a cache of images and sleeps for 20 ms.
        command = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute_kv)
        await self._command("pause", command)

    async def load(self, weights: Weights) -> None:
        self._check_alive()
        if self._paused_at is None:
            raise RuntimeError("load without pause: a token could be sampled from a half-updated model")
        await (self._transfer(weights) if isinstance(weights, LeasedWeights) else self._copy(weights))
        self.held_version = weights.id.order
        self._fit.forget()

    async def _name_version(self) -> None:
        if names_versions():
            await self._command("update_weight_version", self._llm.update_weight_version(str(self.held_version[1])))

    async def _transfer(self, weights: LeasedWeights) -> None:
        from asyncrl.actors.engines.vllm.transfer import transfer

        await transfer(self._llm, weights, self._command)

    async def _copy(self, weights: Weights) -> None:
        tensors = await asyncio.to_thread(self._fit.tensors, weights)
        path: Path | None = getattr(weights, "path", None)
        if path is None or not await self._load_file(path, weights.id.digest):
            # The weights are in no file, or the publisher has removed it: what is mapped here is written again.
            with leftovers.in_memory("vllm") as folder:
                copy, digest = await asyncio.to_thread(_write, folder, tensors)
                if not await self._load_file(copy, digest):
                    raise EngineDied(f"vLLM's worker cannot open {copy}: it must run on this host")

    async def _load_file(self, path: Path, digest: str) -> bool:
        return all(await self._in_worker("asyncrl_load", str(path), digest))

    async def resume(self) -> None:
        self._check_alive()
        # vLLM handles these in order: it samples with the new version's name from here on.
        await asyncio.gather(self._name_version(), self._command("resume", self._llm.resume_generation()))
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        self._open.set()

    def load_stats(self) -> Mapping[str, float]:
        counts = self._requests.counts if self._requests else EngineCounts()
        waiting = min(counts.waiting, len(self._running))
        return {
            "running": float(len(self._running) - waiting),
            "waiting": float(waiting),
            "paused_s": self._paused_s,
            "kv_use": counts.kv_use,
            "generated": float(counts.generated),
            "prefilled": float(counts.prefilled),
            "prefix_reused": float(counts.prefix_reused),
            "preempted": float(counts.preempted),
        }

    async def _in_worker(self, method: str, *args: Any) -> list[bool]:
        """Call a method of every worker; one result per worker."""
        results: list[bool] = await self._command(method, self._llm.collective_rpc(method, args=args))
        return results

    async def _command(self, name: str, reply: Awaitable[Result]) -> Result:
        try:
            return await asyncio.wait_for(reply, self._settings.call_s)
        except TimeoutError as error:
            raise EngineDied(f"vLLM did not answer {name!r} within {self._settings.call_s:g} s") from error
        except Exception as error:
            raise EngineDied(f"vLLM failed at {name!r}: {error}") from error

    def _check_alive(self) -> Requests:
        if self._llm is None or self._requests is None:
            raise EngineDied("the engine is not running: it was closed, or never started")
        if self._llm.errored:
            raise EngineDied("vLLM's engine ended; its log says why")
        return self._requests


def _generation(request: Request, reason: str, held: int, recorded: Float32 | None) -> Generation:
    """`held`: the version at the start, for a vLLM that reports none (it is drained before new weights).
    `recorded`: the board's logprobs."""
    ids = np.asarray(request.token_ids, np.int32)
    logprobs = np.concatenate([np.zeros(0, np.float32), *request.logprobs]) if recorded is None else recorded
    versions = np.full(len(ids), held, np.int32)
    for first, version in request.versions:
        versions[first:] = version
    if missing := int((~np.isfinite(logprobs)).sum()):
        raise EngineDied(
            f"{missing} of {len(ids)} sampled tokens have no logprob: vLLM's worker did not write them. Set "
            "actors.engine_options.record false: then vLLM reports them."
        )
    if reason not in ("stop", "length", "abort") or len(logprobs) != len(ids):
        raise EngineDied(f"vLLM ended a request with {reason!r}, {len(ids)} tokens and {len(logprobs)} logprobs")
    if request.max_kept and len(request.kept) != len(ids):
        raise EngineDied(
            f"vLLM returned the kept ids of {len(request.kept)} of {len(ids)} tokens, although it was started with "
            "return_sampling_mask; its batch-sharded sampler drops them: remove it from actors.engine_options.args"
        )
    kept = kept_ids(request.kept, request.max_kept) if request.max_kept else None
    return Generation(ids, logprobs, versions, cast(Literal["stop", "length", "abort"], reason), *request.cost, kept)


def _write(folder: Path, tensors: Mapping[str, Any]) -> tuple[Path, str]:
    """(path, digest) of the file."""
    from asyncrl.weights.local.shm import ShmPublisher, ShmSubscriber

    id = ShmPublisher(folder, keep=1).publish(0, 0, tensors.items())
    return ShmSubscriber(folder).open(verify=False).path, id.digest
