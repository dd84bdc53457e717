"""Engines behind HTTP: servers of one kind, each with the whole model, addressed in their own dialect.

    generate ──token ids──> the server with the fewest requests; it streams ids, logprobs, versions
    pause, load, resume ──> all servers at once (http.py); weights are sent by the carrier for this kind of server

The servers belong to one actor alone, since a pause by another actor would not be known here. While paused, new
requests wait here, so that they are computed with the new weights only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import httpx
import numpy as np

from asyncrl.actors.engines.checks import Fit, checkpoint_shapes, prompt_of
from asyncrl.actors.engines.protocol import EngineDied, Generation, Sampling
from asyncrl.actors.engines.servers.dialect import Carrier, Dialect, Output
from asyncrl.actors.engines.servers.http import Server, Servers
from asyncrl.actors.engines.servers.process import ServerProcess
from asyncrl.errors import ConfigError
from asyncrl.process import leftovers
from asyncrl.trajectory.kept_ids import kept_ids

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Weights


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One actor's servers."""

    model: Path
    """The Hugging Face folder, with safetensors, that the servers serve."""
    max_tokens: int
    """Longest sequence, prompt and output together."""
    urls: tuple[str, ...]
    start_s: float = 180.0
    """Seconds within which every server must serve."""
    call_s: float = 120.0
    """Deadline, in seconds, of a command: pause, load, resume."""
    idle_s: float = 300.0
    """Seconds without a token after which a request's server counts as dead."""
    weights_dir: Path | None = None
    """Folder in which the servers find new weights; None: shared memory, for servers on this host."""


@dataclass(slots=True)
class _Request:
    """A running request."""

    name: str
    """The server's name for it."""
    server: Server
    task: asyncio.Task[Generation] | None = None
    aborted: bool = False
    """Whether this engine aborted it."""


class ServerEngine:
    honours_seeds = False
    """Servers sample with generators of their own."""

    def __init__(
        self, dialect: Dialect, carrier: Carrier, settings: ServerSettings, process: ServerProcess | None = None
    ) -> None:
        """`process`: the server that this engine starts and ends; None: the servers run already. Raises ConfigError."""
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(settings.model).get_text_config()
        self.held_version = (0, 0)
        self._dialect, self._carrier, self._settings, self._process = dialect, carrier, settings, process
        self._vocab = int(model.vocab_size)
        optional = ("lm_head.weight",) if getattr(model, "tie_word_embeddings", False) else ()
        self._fit = Fit(checkpoint_shapes(settings.model), optional)
        self.servers = Servers(settings.urls, settings.call_s, settings.idle_s, dialect.refused)
        # Part of every request's name at the servers. SGLang aborts all names with the given prefix, and a request's
        # own name once more 2 s after its end: so no two engines share a name, none is a prefix of another, and none
        # is used again.
        self._tag = uuid.uuid4().hex[:8]
        self._number = 0
        self._running: dict[str, _Request] = {}
        self._open = asyncio.Event()
        self._closing = False
        self._generated = 0
        self._recompute = True
        self._paused_at: float | None = None
        self._paused_s = 0.0

    async def start(self) -> None:
        """Returns when every server serves. Raises EngineDied when one does not within `start_s`."""
        self.servers.open()
        try:
            if self._process is not None:
                self._process.start()
            ended = self._process.ended if self._process is not None else lambda: ""
            await self.servers.until_they_serve(self._dialect.health, self._settings.start_s, ended)
            await self._command(self._dialect.resume())
            await self._command(self._dialect.name_version(str(self.held_version[1])))
            await self._carrier.start(self.servers)
        except BaseException:
            await self.close()
            raise
        self._open.set()

    async def close(self) -> None:
        self._closing = True
        self._open.set()
        for running in self._running.values():
            if running.task is not None:
                running.task.cancel()
        self._carrier.close()
        await self.servers.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        self._check_alive()
        room = self._settings.max_tokens
        ids = prompt_of(request, prompt, sampling, vocab=self._vocab, room=room, running=self._running)
        self._number += 1
        server = self.servers.least_busy()
        running = _Request(f"{self._tag}-{self._number}-{request};", server)
        n = min(sampling.max_new_tokens, room - len(ids))
        running.task = asyncio.ensure_future(self._generate(running, ids.tolist(), n, sampling))
        self._running[request] = running
        server.running += 1
        try:
            return await running.task
        except asyncio.CancelledError:
            if self._closing:
                raise EngineDied(f"request {request}: the engine was closed") from None
            raise
        finally:
            del self._running[request]
            server.running -= 1

    async def _generate(self, running: _Request, prompt: list[int], n: int, sampling: Sampling) -> Generation:
        began = time.monotonic()
        while not self._open.is_set():  # a pause may come before a waiter that was woken runs
            await self._open.wait()
        url = running.server.url
        salt = f"{self._tag}.{self.held_version[0]}.{self.held_version[1]}"
        path, body = self._dialect.generate(running.name, prompt, n, sampling, salt)
        output, queue_s = Output(), None
        try:
            async with self.servers.client.stream("POST", url + path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise EngineDied(f"{url}{path} answered {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    self._take(line, output)
                    if output.ids and queue_s is None:
                        queue_s = time.monotonic() - began
        except httpx.HTTPError as error:
            raise EngineDied(f"{url} was lost in request {running.name}: {type(error).__name__} {error}") from error
        except asyncio.CancelledError:
            if not self._closing:
                await self._abort(running)
            raise
        if output.reason == "abort" and not running.aborted:
            log.warning("%s aborted request %s by itself: %s", url, running.name, output.why or "no reason given")
        return self._generation(output, running.server, queue_s, sampling.max_kept)

    def _take(self, line: str, output: Output) -> None:
        """Adds what a line of the event stream holds."""
        if line.startswith("data:") and not line.endswith("[DONE]"):
            before = len(output.ids)
            self._dialect.take(json.loads(line[5:]), output)
            self._generated += len(output.ids) - before

    def _generation(self, output: Output, server: Server, queue_s: float | None, max_kept: int) -> Generation:
        ids, logprobs = np.asarray(output.ids, np.int32), np.asarray(output.logprobs, np.float32)
        versions = np.full(len(ids), -1, np.int32)
        for span in output.spans:
            versions[span["start"] : span["end"]] = int(span["version"])
        if output.reason not in ("stop", "length", "abort") or len(logprobs) != len(ids) or (versions < 0).any():
            raise EngineDied(
                f"{server.url} ended a request with {output.reason!r}, {len(ids)} tokens, {len(logprobs)} logprobs and "
                f"the versions {output.spans}: use a release that docs/how-to/engines.md lists"
            )
        if max_kept and len(output.kept) != len(ids):
            raise EngineDied(
                f"{server.url} returned the kept ids of {len(output.kept)} of {len(ids)} tokens, which actors.top_p, "
                "top_k and min_p need: start it with --return-sampling-mask, or set top_p 1, top_k 0 and min_p 0"
            )
        reason = cast(Literal["stop", "length", "abort"], output.reason)
        kept = kept_ids(output.kept, max_kept) if max_kept else None
        return Generation(ids, logprobs, versions, reason, queue_s, kept=kept)

    async def abort(self, request: str) -> None:
        if (running := self._running.get(request)) is not None:
            running.aborted = True
            await self._abort(running)

    async def _abort(self, running: _Request) -> None:
        with contextlib.suppress(EngineDied):  # the request itself reports why its server died
            await self.servers.post(running.server, *self._dialect.abort(running.name))

    async def check(self, weights: Weights) -> None:
        await asyncio.to_thread(self._fit.tensors, weights)

    async def pause(self, recompute_kv: bool) -> None:
        self._check_alive()
        self._open.clear()
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        self._recompute = recompute_kv
        await self._command(self._dialect.pause(recompute_kv))

    async def load(self, weights: Weights) -> None:
        self._check_alive()
        if self._paused_at is None:
            raise RuntimeError("load without pause: a token could be sampled from a half-updated model")
        tensors = await asyncio.to_thread(self._fit.tensors, weights)
        version = str(weights.id.version)
        with leftovers.in_memory("server", self._settings.weights_dir) as folder:
            await self._carrier.load(self.servers, folder, tensors, version, self._recompute)
        await self._command(self._dialect.name_version(version))
        self.held_version = weights.id.order
        self._fit.forget()

    async def resume(self) -> None:
        await self._command(self._dialect.resume())
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
        self._open.set()

    def load_stats(self) -> Mapping[str, float]:
        """Servers are not asked for their load: `waiting`, `kv_use` and the totals of the prefill are 0."""
        return {
            "running": float(len(self._running)),
            "waiting": 0.0,
            "paused_s": self._paused_s,
            "kv_use": 0.0,
            "generated": float(self._generated),
            "prefilled": 0.0,
            "prefix_reused": 0.0,
        }

    async def _command(self, command: tuple[str, Any]) -> None:
        await self.servers.command(lambda _: command)

    def _check_alive(self) -> None:
        self.servers.client  # noqa: B018


def own_urls(urls: Sequence[str], actors: int) -> tuple[str, ...]:
    """This actor's share of `urls`, divided among `actors` actors. Raises ConfigError."""
    if isinstance(urls, str) or not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ConfigError(
            f"actors.engine_options.urls is {urls!r}, expected a list of http://host:port, one per server."
        )
    if len(urls) < actors:
        raise ConfigError(
            f"actors.engine_options.urls names {len(urls)} servers for {actors} actors: a server belongs to one actor. "
            "Lower actors.count or name more servers."
        )
    number = os.environ.get("ASYNCRL_ROLE", "actor-0").rpartition("-")[2]
    first = int(number) if number.isdecimal() else 0
    return tuple(urls[first :: max(actors, 1)])
