"""One episode, token in, token out: the environment and the policy take turns until one of four limits ends it.

    takes   a ticket, an environment, an engine, a renderer
    gives   EpisodeResult: rows of tokens with mask, logprobs and versions; the reward

    prompt ──> [generate ──> parse ──> environment.step ──> render tail] ──> ... ──> EpisodeResult
               sampled ids: mask 1                          context: mask 0

    unblocked by   tokens of the engine; the environment, which has `env.call_s` for each call

Where turns are durable, the samples and the environment's answers come first from the ticket's recording
(recorded/), and the loop does not tell the difference.

Sampled ids are never encoded again. The environment's messages are rendered once, as a tail appended to the row. Where
the chat template would change earlier tokens, the row ends and a new row starts with the whole conversation.

An error of the environment fails this episode only: EpisodeFailed, never reward 0. Engine errors are not caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from asyncrl.actors.engines.protocol import Engine, Generation, PromptTooLong
from asyncrl.actors.envs.protocol import Env, Turn
from asyncrl.actors.episodes.conversation import Conversation
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.episodes.recorded.environment import RecordedEnv
from asyncrl.actors.episodes.recorded.recording import Recording
from asyncrl.actors.episodes.recorded.samples import Samples
from asyncrl.actors.episodes.rendering import Rendering
from asyncrl.actors.episodes.result import EpisodeResult
from asyncrl.actors.episodes.rows import OpenRow, spans
from asyncrl.rendering.template import Renderer
from asyncrl.trajectory import StopReason, Ticket, TurnRecord
from asyncrl.user_errors import Cause


async def play(
    ticket: Ticket,
    make_env: Callable[[], Env],
    engine: Engine,
    renderer: Renderer,
    limits: EpisodeLimits,
    progress: Progress,
) -> EpisodeResult:
    """Play the episode of `ticket`. Raises EpisodeFailed, Interrupted, and what the engine raises (EngineDied).

    The last assistant message is passed to the environment even if a limit cut it short, so that the environment scores
    every trajectory.
    """
    recording = Recording(ticket.turns, progress)
    return await recording.played(lambda: _played(ticket, make_env, engine, renderer, limits, recording))


async def _played(
    ticket: Ticket,
    make_env: Callable[[], Env],
    engine: Engine,
    renderer: Renderer,
    limits: EpisodeLimits,
    recording: Recording,
) -> EpisodeResult:
    progress = recording.progress
    env = GuardedEnv(
        make_env, limits.call_s, limits.max_reward, lambda: progress.enter("environment"), progress.tools.add
    )
    try:
        said = Conversation(Rendering(renderer, limits), progress)
        samples = Samples(ticket, engine, limits, renderer.stop_token_ids, recording)
        recorded = RecordedEnv(env, recording, said.read, limits.max_snapshot)
        return await _Episode(ticket, recorded, samples, said, limits, progress).run()
    finally:
        await env.close()


@dataclass(slots=True)
class _Episode:
    """The state of one episode: its rows, and what it took to make them."""

    _ticket: Ticket
    _env: RecordedEnv
    _samples: Samples
    _conversation: Conversation
    _limits: EpisodeLimits
    _progress: Progress
    _rows: list[OpenRow] = field(default_factory=list)
    _turns: int = 0
    _records: list[TurnRecord] = field(default_factory=list)

    async def run(self) -> EpisodeResult:
        try:
            stop_reason = await self._take_turns()
        except PromptTooLong as error:
            if self._turns == 0:
                detail = f"task {self._ticket.task['id']}: {error}"
                raise EpisodeFailed("env_error", detail, Cause("too long")) from error
            stop_reason = "max_tokens"
        rows, env = tuple(row.freeze() for row in self._rows), self._env.env
        messages, earned = self._conversation.transcript, env.earned.by_turn(spans(self._rows))
        about = (self._turns, stop_reason, messages, self._records, earned)
        return EpisodeResult(rows, env.reward, env.rewards, env.metrics, *about, env.feedback)

    async def _take_turns(self) -> StopReason:
        first = await self._env.reset({**self._ticket.task, "episode": self._ticket.id.index})
        row = await self._conversation.begin(first, self._env.env.tools)
        while True:
            generation = await self._generate(row)
            message = self._conversation.parse(generation.token_ids.tolist())
            last, stopped = self._turns == self._limits.max_turns, generation.stop_reason == "stop"
            # The environment learns how many tokens were sampled (for a length penalty), but not which.
            told = {**message, "tokens": len(generation.token_ids), "last": last}
            turn = await self._env.step(told, self._turns - 1)
            self._records[-1] = replace(self._records[-1], environment=self._env.seconds)
            if turn.done and stopped:
                return "done"
            if len(row.ids) >= self._limits.max_tokens:
                return "max_tokens"
            if turn.done:
                return "length"
            if last:
                return "max_turns"
            row = await self._continue(row, turn, closed=stopped)

    async def _generate(self, row: OpenRow, *, summary: bool = False) -> Generation:
        """One turn of the policy, appended to `row`. Raises PromptTooLong when the row has no room for it."""
        turn = await self._samples.next(row, self._turns, summary=summary)
        if not row.sampled_any:
            self._rows.append(row)
        row.sampled(turn.generation)
        self._records.append(turn.cost)
        self._progress.sampled(len(turn.generation.token_ids))
        self._turns += 1
        return turn.generation

    async def _continue(self, row: OpenRow, turn: Turn, *, closed: bool) -> OpenRow:
        """The row of the policy's next turn. Where `row` has become long, the policy sums the conversation up first."""
        if not turn.messages:
            raise EpisodeFailed("env_error", "environment.step returned no messages although the episode is not done")
        compaction = self._limits.compaction
        if not compaction.due(len(row.ids), self._turns):
            return await self._conversation.go_on(row, turn.messages, closed=closed)
        row = await self._conversation.go_on(row, compaction.asking(turn.messages), closed=closed)
        summary = await self._generate(row, summary=True)
        self._env.env.earned.unheard()
        return await self._conversation.compact(row, summary.token_ids.tolist(), compaction)
