"""Wrappers: each takes a score and is a score itself, so that they compose.

overlong_penalty(rate_limited(judge, requests_per_minute=60), max_tokens=1024, buffer_tokens=256)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.rewards.score import Score, Scored, call, name_of, scored


class Batched:
    """Collects calls and scores them in batches, for scores with plural arguments, as in verl's batch manager.

    The score is `(data_sources, solution_strs, ground_truths, extra_infos) -> sequence of floats or dicts`, all of one
    length.
    """

    takes_all = True
    _PLURAL: Mapping[str, str] = {
        "data_source": "data_sources",
        "solution_str": "solution_strs",
        "ground_truth": "ground_truths",
        "extra_info": "extra_infos",
    }

    def __init__(
        self, score: Score, *, size: int = 64, wait_s: float = 0.05, plural: dict[str, str] | None = None
    ) -> None:
        """
        Args:
            size: maximum of calls in a batch.
            wait_s: seconds that the first call waits for others.
            plural: column -> the score's name for the list of them, where it is not verl's.
        """
        self._plural = plural or self._PLURAL
        self._score, self._size, self._wait_s = score, size, wait_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[tuple[Mapping[str, Any], asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, **columns: Any) -> Any:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting, self._timer = loop, [], None
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((columns, future))
        if len(self._waiting) >= self._size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = [entry for entry in self._waiting if not entry[1].done()], []
        if batch:
            task = asyncio.ensure_future(self._run(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch: Sequence[tuple[Mapping[str, Any], asyncio.Future[Any]]]) -> None:
        plural = {many: [columns[one] for columns, _ in batch] for one, many in self._plural.items()}
        try:
            results = list(await call(self._score, plural))
            if len(results) != len(batch):
                raise ValueError(f"score {name_of(self._score)} returned {len(results)} results for {len(batch)}")
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)


class Bucket:
    """A token bucket: an even rate, with a burst of ten seconds' worth; later callers wait in order."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, self._rate * 10)
        self._level, self._at = self._most, 0.0

    def take(self, amount: float, now: float) -> float:
        """Seconds from `now` after which the `amount` may be used. `now` never decreases.

        >>> bucket = Bucket(per_minute=60)
        >>> [bucket.take(1, now=0.0) for _ in range(12)][-2:]
        [1.0, 2.0]
        """
        self._level = min(self._most, self._level + (now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -self._level / self._rate)


class RateLimited:
    """Limits the calls of a score to a service. The limits are per actor: divide by `actors.count`.

    The waiting counts towards `env.call_s`: raise that as well.
    """

    takes_all = True

    def __init__(
        self,
        score: Score,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrency: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        """
        Args:
            tokens_per_minute: tokens are estimated as a quarter of the characters of prompt and solution.
            concurrency: calls at the same time.
        """
        self._score, self._clock, self._sleep = score, clock, sleep
        self._requests = Bucket(requests_per_minute) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute) if tokens_per_minute else None
        self._concurrency = concurrency
        self._slots: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore | None] = (None, None)

    async def __call__(self, **columns: Any) -> Any:
        now = self._clock()
        delay = self._requests.take(1, now) if self._requests else 0.0
        if self._tokens:
            text = f"{columns.get('task', {}).get('prompt', '')}{columns['solution_str']}"
            delay = max(delay, self._tokens.take(len(text) / 4, now))
        if delay:
            await self._sleep(delay)
        slots = self._of_this_loop()
        if slots is None:
            return await call(self._score, columns)
        async with slots:
            return await call(self._score, columns)

    def _of_this_loop(self) -> asyncio.Semaphore | None:
        loop = asyncio.get_running_loop()
        if self._concurrency and self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        return self._slots[1]


class OverlongPenalty:
    """DAPO (2503.14476): score + min(-(tokens - (max_tokens - buffer_tokens)) / buffer_tokens * factor, 0).

    `tokens` are those of the text that is scored. The same over a whole episode, on the learner's side:
    `asyncrl/learner/objective/shaping.py`.
    """

    takes_all = True

    def __init__(self, score: Score, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> None:
        """
        Args:
            max_tokens: at this length the penalty is `factor`; `actors.max_new_tokens` as a rule.
            buffer_tokens: over the last so many tokens before it the penalty grows from 0.
        Raises ValueError unless 0 < buffer_tokens <= max_tokens.
        """
        if not 0 < buffer_tokens <= max_tokens:
            raise ValueError(f"buffer_tokens is {buffer_tokens}, expected 1 to max_tokens = {max_tokens}.")
        self._score, self._allowed, self._buffer, self._factor = (
            score,
            max_tokens - buffer_tokens,
            buffer_tokens,
            factor,
        )

    async def __call__(self, **columns: Any) -> Scored:
        result = scored(await call(self._score, columns), name_of(self._score))
        tokens = columns.get("tokens")
        if tokens is None:
            raise ValueError("overlong_penalty: this environment does not count the tokens of the text")
        penalty = min(-(tokens - self._allowed) / self._buffer * self._factor, 0.0)
        return Scored(result.value + penalty, {**result.metrics, "overlong_penalty": penalty}, result.parts)


class Weighted:
    """The weighted sum of several scores, computed concurrently; each is also kept by its name."""

    takes_all = True

    def __init__(self, scores: Mapping[str, tuple[float, Score]]) -> None:
        """`scores`: (weight, score) by name."""
        self._scores = scores

    async def __call__(self, **columns: Any) -> Scored:
        async def one(name: str, score: Score) -> Scored:
            return scored(await call(score, columns), name)

        results = await asyncio.gather(*(one(name, score) for name, (_, score) in self._scores.items()))
        weights = [weight for weight, _ in self._scores.values()]
        parts = {name: result.value for name, result in zip(self._scores, results, strict=True)}
        metrics = {
            f"{name}/{key}": number
            for name, result in zip(self._scores, results, strict=True)
            for key, number in result.metrics.items()
        }
        return Scored(sum(w * result.value for w, result in zip(weights, results, strict=True)), metrics, parts)
