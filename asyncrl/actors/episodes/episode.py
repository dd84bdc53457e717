"""One episode, token in, token out: the environment and the policy take turns until one of four limits ends it.

    prompt ──> [generate ──> parse ──> environment.step ──> tail] ──> ... ──> Trajectory
               sampled ids: mask 1                          context: mask 0

Sampled ids are never encoded again. What the environment says is rendered once, as the tail behind them; where the chat
template would change what stands before it, the row ends and a new one starts with the whole conversation.

What goes wrong in the environment costs this episode only: EpisodeFailed, never reward 0. What goes wrong in the
engine is not the episode's affair and passes through.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.actors.engines.protocol import Engine, Generation, PromptTooLong, Sampling
from asyncrl.actors.envs.protocol import Env, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, PlayedEnv
from asyncrl.actors.episodes.resumption import first_turn
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.actors.rendering.template import Renderer, tell_prefix_break
from asyncrl.config import Config
from asyncrl.data.base import Message
from asyncrl.trajectory import Row, StopReason, Ticket, Trajectory

__all__ = ["EpisodeFailed", "Limits", "Progress", "Result", "finished", "play"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of every episode, from the config."""

    max_turns: int
    max_tokens: int
    """Of one row."""
    max_new_tokens: int
    """Of one turn."""
    call_s: float
    """Seconds for one call of the environment."""
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: Config) -> Limits:
        env, actors = config.env, config.actors
        return cls(env.max_turns, env.max_tokens, actors.max_new_tokens, env.call_s, actors.top_p, actors.top_k)


@dataclass(slots=True)
class Progress:
    """Where an episode stands; written by it, read by the thread that renews its lease."""

    at: float
    """When it last got on, by `clock`."""
    phase: str = "environment"
    """`environment`, `generate`, or `put` (over, not yet acknowledged)."""
    tokens: int = 0
    """Sampled so far."""
    taken_over: int = 0
    """Of these, from the ticket's prefix: sampled by an earlier attempt."""
    interruptible: str = ""
    """Name of the engine's request for the first turn, while that runs: aborted, it leaves a prefix."""
    interrupted: bool = False
    """To be set before that is done: the actor leaves."""
    prefix: Row | None = None
    """Then: prompt and what was sampled, if anything was."""
    prefix_breaks: int = 0
    """How often the chat template changed what stood before, so that a new row began."""
    seconds: dict[str, float] = field(default_factory=lambda: {"environment": 0.0, "generate": 0.0})
    clock: Callable[[], float] = time.monotonic
    changed: Callable[[], None] = lambda: None

    def enter(self, phase: str) -> None:
        now = self.clock()
        if self.phase in self.seconds:
            self.seconds[self.phase] += now - self.at
        self.at, self.phase = now, phase
        self.changed()


async def play(
    ticket: Ticket,
    make_env: Callable[[], Env],
    engine: Engine,
    renderer: Renderer,
    limits: Limits,
    progress: Progress,
    *,
    actor: str,
    env_name: str,
    said: list[Message] | None = None,
) -> Trajectory:
    """Play the episode of `ticket`. Raises EpisodeFailed, Interrupted, and what the engine raises (EngineDied).

    `said` gets the conversation, up to the last message of the policy.

    The last assistant message is handed to the environment also when a limit cut it short, so that every trajectory
    is scored by it.
    """
    start = progress.at
    env = PlayedEnv(make_env, limits.call_s, lambda: progress.enter("environment"))
    try:
        episode = _Episode(ticket, env, engine, renderer, limits, progress)
        stop_reason = await episode.run()
        if said is not None:
            said += episode.messages if episode.last is None else [*episode.messages, episode.last]
    finally:
        await env.close()
    rows = tuple(row.freeze() for row in episode.rows)
    result = Result(rows, env.reward, env.rewards, env.metrics, episode.turns, stop_reason)
    return finished(ticket, result, progress, start, actor=actor, env_name=env_name)


@dataclass(frozen=True, slots=True)
class Result:
    """What an episode came to."""

    rows: tuple[Row, ...]
    reward: float
    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    turns: int
    stop_reason: StopReason


def finished(
    ticket: Ticket, result: Result, progress: Progress, start: float, *, actor: str, env_name: str
) -> Trajectory:
    """The trajectory of an episode that began at `start`, by the progress's clock, and is over now."""
    progress.enter("put")
    return Trajectory(
        id=ticket.id,
        attempt=ticket.attempt,
        kind=ticket.kind,
        actor=actor,
        task_id=str(ticket.task["id"]),
        env=env_name,
        rows=result.rows,
        reward=result.reward,
        rewards=result.rewards,
        turns=result.turns,
        stop_reason=result.stop_reason,
        timings={**progress.seconds, "total": progress.at - start},
        metrics=result.metrics,
    )


class _Episode:
    """The state of one episode: its rows, and the conversation so far."""

    def __init__(
        self, ticket: Ticket, env: PlayedEnv, engine: Engine, renderer: Renderer, limits: Limits, progress: Progress
    ) -> None:
        self.rows: list[OpenRow] = []
        self.turns = 0
        self._ticket, self._env, self._engine, self._renderer = ticket, env, engine, renderer
        self._limits, self._progress = limits, progress
        self.messages: list[Message] = []
        self.last: Message | None = None
        """The policy's, until it is answered: then `messages` hold it."""
        self._tools: list[Any] = []

    async def run(self) -> StopReason:
        task = {**self._ticket.task, "episode": self._ticket.id.index}
        self.messages = await self._env.reset(task)
        self._tools = self._env.tools
        row = self._new_row()
        while True:
            generation = await self._generate(row)
            if generation is None:
                return "max_tokens"
            with _refused("the renderer cannot read what the policy said"):
                message = self.last = self._renderer.parse(generation.token_ids.tolist())
            # How much was sampled is the environment's to know (a penalty for length), which ids is not.
            last = self.turns == self._limits.max_turns
            told = {**message, "tokens": len(generation.token_ids), "last": last}
            answer = await self._env.step(told)
            if answer.done and generation.stop_reason == "stop":
                return "done"
            if len(row.ids) >= self._limits.max_tokens:
                return "max_tokens"
            if answer.done:
                return "length"
            if last:
                return "max_turns"
            row = self._continue(row, message, answer, closed=generation.stop_reason == "stop")

    async def _generate(self, row: OpenRow) -> Generation | None:
        """One turn of the policy, appended to `row`; None when the row has no room for it."""
        t = self._ticket
        sampling = Sampling(
            max_new_tokens=self._limits.max_new_tokens,
            temperature=t.temperature,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=t.seed * 1_000_003 + self.turns,
            top_p=self._limits.top_p,
            top_k=self._limits.top_k,
        )
        self._progress.enter("generate")
        try:
            name = f"{t.id}-{t.attempt}/{self.turns}"
            if self.turns:
                generation = await self._engine.generate(name, row.ids, sampling)
            else:
                generation = await first_turn(self._engine, name, row.ids, sampling, t.prefix, self._progress)
        except PromptTooLong as error:
            if self.turns == 0:
                raise EpisodeFailed("env_error", f"task {t.task['id']}: {error}") from error
            return None
        finally:
            self._progress.enter("environment")
        if generation.stop_reason == "abort":
            raise EpisodeFailed("aborted", f"{t.id} in turn {self.turns}")
        if not row.sampled_any:
            self.rows.append(row)
        row.sampled(generation)
        self._progress.tokens += len(generation.token_ids)
        self.turns += 1
        return generation

    def _continue(self, row: OpenRow, message: Message, answer: Turn, *, closed: bool) -> OpenRow:
        """The row in which the policy speaks next: this one with the environment's words, or a new one."""
        if not answer.messages:
            raise EpisodeFailed("env_error", "environment.step returned no messages although the episode is not done")
        before = [*self.messages, message]
        with _refused("the chat template refuses what step said"):
            tail = self._renderer.render_tail(
                before, answer.messages, self._tools, closed=closed, row=row.ids, sampled=row.last_sampled
            )
        self.messages, self.last = [*before, *answer.messages], None
        if tail is None:
            self._progress.prefix_breaks += 1
            tell_prefix_break(answer.messages[0]["role"])
            return self._new_row()
        row.context(tail)
        return row

    def _new_row(self) -> OpenRow:
        with _refused("the chat template refuses the conversation"):
            return OpenRow(self._renderer.render_initial(self.messages, self._tools))


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Raises EpisodeFailed: a template may raise anything over what an environment, or the policy, said."""
    try:
        yield
    except Exception as error:
        raise EpisodeFailed("env_error", f"{what}: {type(error).__name__}: {error}") from error
