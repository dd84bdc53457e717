"""New weights for a running engine: found, verified, loaded between two tokens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.weights.protocol import Subscriber, Weights, WeightsCorrupt, WeightsVersion

log = logging.getLogger(__name__)

REOPEN_S = 20.0
"""Weights opened longer than this before the engine paused are opened again: the learner keeps them for a minute."""


class DrainingEngine:
    """An engine whose `pause` waits until running requests end, and delays new ones (`weights.drain`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def held_version(self) -> tuple[int, int]:
        return self._engine.held_version

    @held_version.setter
    def held_version(self, value: tuple[int, int]) -> None:
        self._engine.held_version = value

    async def start(self) -> None:
        await self._engine.start()

    async def close(self) -> None:
        await self._engine.close()

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self._engine.generate(request, prompt, sampling)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def abort(self, request: str) -> None:
        await self._engine.abort(request)

    async def pause(self, recompute_kv: bool) -> None:
        self._open.clear()
        await self._idle.wait()
        await self._engine.pause(recompute_kv)

    async def check(self, weights: Weights) -> None:
        await self._engine.check(weights)

    async def load(self, weights: Weights) -> None:
        await self._engine.load(weights)

    async def resume(self) -> None:
        await self._engine.resume()
        self._open.set()

    def load_stats(self) -> Mapping[str, float]:
        return self._engine.load_stats()


class WeightUpdates:
    """Loads versions newer than the one held, of a later branch or later on the same branch; or one that was asked for,
    which may be older."""

    def __init__(self, engine: Engine, subscriber: Subscriber, *, recompute_kv: bool) -> None:
        self._engine, self._subscriber, self._recompute_kv = engine, subscriber, recompute_kv
        self.loading = False
        self.count = 0
        self.load_s = 0.0
        """Seconds that the last update took, including reading and checking."""

    def _wanted(self, found: WeightsVersion | None, version: tuple[int, int] | None) -> bool:
        """Whether a version that is there is to be loaded."""
        if found is None:
            return False
        if version is not None:
            return found.order == version and (not self.count or self._engine.held_version != version)
        return not self.count or found.order > self._engine.held_version

    def _found(self, version: tuple[int, int] | None) -> WeightsVersion | None:
        pinned = self._subscriber.pinned() if version is not None else None
        return pinned if pinned is not None and pinned.order == version else self._subscriber.latest()

    async def look(self, postpone: Callable[[], bool] = lambda: False, version: tuple[int, int] | None = None) -> bool:
        """Load a newer version, or `version` if it is not held, unless there is none or `postpone()` holds once it is
        read and checked. Returns whether one was loaded.

        Corrupt weights are not loaded; the next look tries again. Raises WeightsMismatch.
        """
        start = time.monotonic()
        try:
            if not self._wanted(self._found(version), version):
                return False
            # Every byte is read here, while the engine still generates.
            weights = await asyncio.to_thread(self._subscriber.open, version=version)
            opened = time.monotonic()
        except WeightsCorrupt as error:
            log.error("weights were not loaded: %s", error)
            return False
        try:
            if not self._wanted(weights.id, version):
                return False
            await self._engine.check(weights)
            if postpone():
                return False
            self.loading = True
            await self._engine.pause(self._recompute_kv)
            try:
                if time.monotonic() - opened > REOPEN_S:
                    weights.close()
                    weights = await asyncio.to_thread(self._subscriber.open, version=version)
                    await self._engine.check(weights)
                await self._engine.load(weights)
            finally:
                await self._engine.resume()
        except WeightsCorrupt as error:  # raised while reading, before anything was changed
            log.error("weights were not loaded: %s", error)
            return False
        finally:
            self.loading = False
            weights.close()
        self.count += 1
        self.load_s = time.monotonic() - start
        return True
