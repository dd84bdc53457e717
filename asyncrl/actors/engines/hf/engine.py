"""The embedded engine: a transformers model, a static KV cache, continuous admission.

    asyncio side                              engine thread
    generate ──request──> inbox ──┐     ┌──> read the inbox: requests, aborts, pause / load / resume
    abort, pause, load, resume ───┴─────┤    fill free slots; one pass: prefill new prompts, one token for the others
    futures <──once per step, batched───┴─── resolve the finished requests
                                             unblocked by: a message in the inbox

Weights change only between two steps. A token's version is the one held when its step began.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from asyncrl.actors.engines.checks import Fit, prompt_of
from asyncrl.actors.engines.hf.decode import FusedForward, supported
from asyncrl.actors.engines.hf.forward import Forward, KVCache, PlainForward
from asyncrl.actors.engines.hf.plan import Planned, decode, prefill, share
from asyncrl.actors.engines.hf.slots import KVSlots, Tokens
from asyncrl.actors.engines.kept import kept_of
from asyncrl.actors.engines.protocol import EngineDied, Generation, Sampling
from asyncrl.actors.engines.sampling import sample, truncate
from asyncrl.checkpoint_names import places, put
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.trajectory.kept_ids import kept_ids

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Weights

log = logging.getLogger(__name__)


def from_config(config: Config, *, forward: Literal["auto", "fused", "plain"] = "auto") -> HFEngine:
    """`actors.engine: hf`. Raises ConfigError when the model has fewer positions than `env.max_tokens`."""
    from asyncrl.model import load_model

    torch.set_num_threads(config.actors.threads)
    model = load_model(config.model)
    return HFEngine(model, slots=config.actors.most_slots, max_tokens=config.env.max_tokens, forward=forward)


@dataclass(slots=True, eq=False)
class _Request:
    name: str
    prompt: Tokens
    sampling: Sampling
    future: asyncio.Future[Generation]
    began: float
    queue_s: float | None = None


class HFEngine:
    def __init__(
        self, model: Any, *, slots: int, max_tokens: int, forward: Literal["auto", "fused", "plain"] = "auto"
    ) -> None:
        """
        Args:
            model: a causal language model of transformers, on the CPU. The engine writes new weights into it.
            slots: sequences generated at the same time; further requests wait.
            max_tokens: the longest sequence, prompt and output together.
            forward: `fused` (the families of decode.py), `plain` (any), or `auto`: fused where supported.
        """
        positions = getattr(model.config, "max_position_embeddings", max_tokens)
        if max_tokens > positions:
            raise ConfigError(f"env.max_tokens is {max_tokens} but the model has {positions} positions: lower it.")
        window = getattr(model.config, "sliding_window", None) or max_tokens
        if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()) and max_tokens > window:
            raise ConfigError(f"env.max_tokens is {max_tokens} but the model attends to {window} tokens: lower it.")
        self.held_version = (0, 0)
        self._model = model.eval().requires_grad_(False)
        self._places = places(model)
        trained = {name for name, _ in model.named_parameters()}
        optional = {name for name, place in self._places.items() if place.name not in trained}
        self._fit = Fit({name: place.shape for name, place in self._places.items()}, optional)
        self._slots = KVSlots(slots, max_tokens, model.get_output_embeddings().weight.shape[0])
        self._cache = KVCache(model, slots, max_tokens)
        fused = supported(model.config) if forward == "auto" else forward == "fused"
        self._forward: Forward = (FusedForward if fused else PlainForward)(model, self._cache)
        self._running: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._names: set[str] = set()
        self._inbox: deque[Callable[[], None]] = deque()
        self._done: list[tuple[asyncio.Future[Any], Any]] = []
        self._wake = threading.Event()
        self._closing = self._paused = self._recompute = False
        self._paused_at = 0.0
        self._death: BaseException | None = None
        self._totals = {"generated": 0.0, "prefilled": 0.0, "prefix_reused": 0.0, "paused_s": 0.0}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # The asyncio side.

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        self._check_alive()
        vocab, room = self._slots.stops.shape[1], self._slots.room
        ids = prompt_of(request, prompt, sampling, vocab=vocab, room=room, running=self._names)
        self._names.add(request)
        new = _Request(request, ids, sampling, asyncio.get_running_loop().create_future(), time.monotonic())
        self._post(lambda: self._waiting.append(new))
        try:
            return await new.future
        except asyncio.CancelledError:
            self._post(lambda: self._abort(request))
            raise
        finally:
            self._names.discard(request)

    async def abort(self, request: str) -> None:
        self._post(lambda: self._abort(request))

    async def pause(self, recompute_kv: bool) -> None:
        await self._call(lambda: self._pause(recompute_kv))

    async def check(self, weights: Weights) -> None:
        await asyncio.to_thread(self._fit.tensors, weights)

    async def load(self, weights: Weights) -> None:
        await self._call(lambda: self._load(weights))

    async def resume(self) -> None:
        await self._call(self._resume)

    def load_stats(self) -> Mapping[str, float]:
        s = self._slots
        return {
            "running": float(len(self._running)),
            "waiting": float(len(self._waiting)),
            "kv_use": float(s.length[s.active].sum() / s.tokens.size),
            **self._totals,
        }

    async def _call(self, do: Callable[[], None]) -> None:
        """Run `do` in the engine's thread, between two steps."""
        self._check_alive()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                do()
            except Exception as error:
                self._done.append((future, error))
            else:
                self._done.append((future, None))

        self._post(command)
        await future

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(f"the engine ended: {type(self._death).__name__}: {self._death}") from self._death
        if self._closing or self._loop is None:
            raise EngineDied("the engine is not running: it was closed, or never started")

    def _resolve_done(self) -> None:
        """Resolve the finished futures on the event loop, in one wake-up."""
        done, self._done = self._done, []
        if done and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, done)

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                worked = not self._paused and self._step()
                self._resolve_done()
                if not worked:
                    self._wake.wait(1.0)
        except Exception as error:
            log.exception("the engine ended")
            self._death = error
        finally:
            self._closing = True
            while self._inbox:  # commands that will not run still end their callers' wait
                self._inbox.popleft()()
            for request in [*self._running.values(), *self._waiting]:
                self._done.append((request.future, EngineDied(f"request {request.name}: the engine ended")))
            self._resolve_done()

    def _step(self) -> bool:
        """One forward pass. Returns whether there was anything to do."""
        self._admit()
        if not self._running:
            return False
        slots, scratch = self._slots, self._cache.scratch
        self._totals["prefix_reused"] += share(slots, self._cache)
        planned = [*prefill(slots, scratch), *decode(slots, scratch)]
        self._totals["prefilled"] += sum(plan.prefilled for plan in planned)
        if planned:
            self._sample(planned)
        return True

    def _admit(self) -> None:
        while self._waiting:
            slot = self._slots.place(self._waiting[0].prompt, self._waiting[0].sampling)
            if slot is None:
                return
            self._running[slot] = self._waiting.popleft()
            self._totals["prefix_reused"] += float(self._slots.cached[slot])

    def _sample(self, planned: Sequence[Planned]) -> None:
        """One forward pass, and one token for each of the planned rows."""
        s = self._slots
        rows = np.concatenate([plan.rows for plan in planned])
        starts = np.cumsum([0, *(len(plan.part.last) for plan in planned)])
        chosen = np.concatenate([start + plan.chosen for start, plan in zip(starts, planned, strict=False)])
        with torch.inference_mode():
            logits = self._forward([plan.part for plan in planned])
            if len(rows) < len(logits):
                logits = logits[torch.from_numpy(chosen)]
            temperature = torch.from_numpy(s.temperature[rows])
            greedy = s.greedy[rows]
            if s.truncated(rows) or s.max_kept[rows].any():
                limits = (torch.from_numpy(x[rows]) for x in (s.top_p, s.top_k, s.min_p))
                logits = truncate(logits, temperature, *limits)
                if s.max_kept[rows].any():
                    s.keep(rows, kept_of(logits, s.max_kept[rows]))
            noise = torch.from_numpy(s.noise[rows, s.length[rows] - s.prompt[rows]])
            token, logprob = sample(logits, noise, temperature, torch.from_numpy(greedy) if greedy.any() else None)
        stopped, full = s.record(rows, token.numpy(), logprob.numpy(), self.held_version[1])
        self._totals["generated"] += len(rows)
        for slot in rows[s.length[rows] - s.prompt[rows] == 1].tolist():
            self._running[slot].queue_s = time.monotonic() - self._running[slot].began
        for slot in stopped.tolist():
            self._finish(slot, "stop")
        for slot in full.tolist():
            self._finish(slot, "length")

    def _finish(self, slot: int, reason: Literal["stop", "length", "abort"]) -> None:
        request = self._running.pop(slot)
        self._done.append((request.future, self._slots.output(slot, reason, request.queue_s)))
        self._slots.release(slot)

    def _abort(self, name: str) -> None:
        for slot, request in self._running.items():
            if request.name == name:
                self._finish(slot, "abort")
                return
        for request in self._waiting:
            if request.name == name:
                self._waiting.remove(request)
                empty, kept = np.zeros(0, np.int32), kept_ids((), 0) if request.sampling.max_kept else None
                nothing = Generation(empty, empty.astype(np.float32), empty, "abort", kept=kept)
                self._done.append((request.future, nothing))
                return

    def _pause(self, recompute_kv: bool) -> None:
        if not self._paused:
            self._paused, self._paused_at = True, time.monotonic()
        self._recompute = recompute_kv

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._totals["paused_s"] += time.monotonic() - self._paused_at

    def _load(self, weights: Weights) -> None:
        if not self._paused:
            raise RuntimeError("load without pause: a token could be sampled from a half-updated model")
        given = self._fit.tensors(weights)
        self._fit.forget()
        own = self._model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in given.items():
                put(own, self._places[name], tensor)
        self._forward.refresh()
        self.held_version = (weights.id.branch, weights.id.version)
        self._slots.weights_changed(self._recompute)


def _resolve(done: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in done:
        if future.done():
            continue  # the caller was cancelled
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
