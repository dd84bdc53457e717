"""The environment of an episode with durable turns: first what was recorded, then the environment itself.

    reset ──> called; the recorded messages are given
    step k, recorded ──────────> the recorded answer
         the last of these ────> the environment catches up: the latest snapshot is restored, and the actions behind it
                                 (all of them, where it is replayable) are stepped again and their answers compared
    step k, not recorded ──────> the environment's answer, which is recorded with its snapshot

Only answers that the environment gave after the last record of the ticket are new; the others are given once, and
counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from asyncrl.actors.envs.protocol import Message, Task, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.recorded.recording import PlaysOtherwise, Recording
from asyncrl.trajectory.turns import DIVERGED, RecordedAnswer, RecordedReset, Snapshot
from asyncrl.user_errors import Cause
from asyncrl.wire.turns import Unrecordable, tools_digest

Parse = Callable[[Sequence[int]], Message]


class RecordedEnv:
    """`reset` and `step` of an environment, as the episode loop calls them; the rest is that of `env`."""

    def __init__(self, env: GuardedEnv, recording: Recording, parse: Parse, most: int) -> None:
        """`parse`: the message of sampled ids. `most`: bytes of a snapshot."""
        self.env, self._recording, self._parse, self._most = env, recording, parse, most
        self.seconds = 0.0
        """That the last step took."""
        self._behind: list[tuple[Message, Turn]] = []
        """Recorded turns that the environment itself has not stepped, and their answers."""

    async def reset(self, task: Task) -> list[Message]:
        """The environment's first messages. Raises EpisodeFailed, and PlaysOtherwise where the tools are others now."""
        recording = self._recording
        if not recording.durable:
            return await self.env.reset(task)
        intent = recording.interrupted
        interrupted = None if intent is None else self._parse(intent.token_ids.tolist())
        messages = await self.env.reset(task, interrupted)
        way = self.env.way
        recording.goes_on, recording.recorded = way in ("snapshot", "replay"), way != "none"
        if way == "told" and recording.only_begun and _plain(messages) == _plain(recording.reset_messages):
            return messages  # nothing was stepped: the first sample goes on
        if way == "told" or (way == "none" and (recording.answers or recording.reset)):
            recording.begin_again()
        if way == "none":
            return messages
        if recording.reset is None:
            recording.begin_again()
            recording.add_soon(await self._recorded_reset(messages))
            return messages
        return await self._begun(recording.reset, messages)

    async def step(self, message: Message, number: int) -> Turn:
        """`number`: of the turn, among all turns of the episode."""
        recorded = self._recording.answers.get(number)
        if recorded is None:
            return await self._step(message, number)
        turn = _turn(recorded)
        self._recording.progress.given = True
        self.env.add(turn, given=True)
        self.seconds = recorded.environment_s
        self._behind.append((message, turn))
        over = turn.done or message["last"]
        if number == self._recording.answered and not over:
            await self._catch_up()
        return turn

    async def _step(self, message: Message, number: int) -> Turn:
        progress = self._recording.progress
        began = progress.at
        turn = await self.env.step(message)
        progress.given = False
        self.seconds = progress.at - began
        recording = self._recording
        # What ends the episode is put at once, and needs no record.
        if recording.recorded and not turn.done and not message["last"]:
            recording.add_soon(self._answer(number, turn, await self._snapshot()))
        return turn

    async def _begun(self, recorded: RecordedReset, messages: Sequence[Message]) -> list[Message]:
        """The episode begins as it was recorded; `messages`: those that the environment gave now."""
        if recorded.tools != _tools_digest(self.env):
            raise PlaysOtherwise("its environment has other tools now")
        if self._recording.snapshot()[1] is None:  # it is stepped again from here
            state = self.env.reset_state
            if _plain(messages) != _plain(recorded.messages) or state != recorded.state:
                raise _diverged("reset", recorded.messages, messages)
        self.env.earned.begin(recorded.state)
        if self._recording.answered < 0:
            await self._catch_up()
        return [dict(message) for message in recorded.messages]

    async def _catch_up(self) -> None:
        """Bring the environment to where the recorded answers end."""
        number, state = self._recording.snapshot()
        again = self._behind
        if state is not None:
            await self.env.restore(state)
            self._recording.progress.stepped_again()
            # Summaries are turns without an answer, so the answered ones are counted.
            stepped = sum(answered <= number for answered in self._recording.answers)
            again = again[stepped:]
        self._behind = []
        for message, answer in again:
            turn = await self.env.step_again(message)
            self._recording.progress.stepped_again()
            then, now = _compared(answer), _compared(turn)
            if now != then:
                raise _diverged("step", then, now)

    async def _recorded_reset(self, messages: Sequence[Message]) -> RecordedReset:
        return RecordedReset(messages, _tools_digest(self.env), self.env.reset_state, await self._snapshot())

    async def _snapshot(self) -> Snapshot | None:
        return await self.env.snapshot(self._most) if self.env.way == "snapshot" else None

    def _answer(self, number: int, turn: Turn, snapshot: Snapshot | None) -> RecordedAnswer:
        return RecordedAnswer(
            number, turn.messages or [], float(turn.reward), bool(turn.done), turn.rewards, turn.metrics, turn.state,
            tuple((name, float(seconds)) for name, seconds in turn.calls), self.seconds, snapshot,
        )  # fmt: skip


def _turn(recorded: RecordedAnswer) -> Turn:
    return Turn(
        messages=[dict(message) for message in recorded.messages], reward=recorded.reward, done=recorded.done,
        metrics=dict(recorded.metrics), rewards=dict(recorded.rewards), state=recorded.state,
        calls=list(recorded.calls),
    )  # fmt: skip


def _compared(turn: Turn) -> tuple[Any, float, bool]:
    """What is equal where a recorded action is stepped again."""
    return _plain(turn.messages), float(turn.reward), bool(turn.done)


def _tools_digest(env: GuardedEnv) -> str:
    try:
        return tools_digest(env.tools)
    except Unrecordable as error:
        raise EpisodeFailed("env_error", f"environment.tools under buffer.turns: {error}") from error


def _plain(messages: Any) -> Any:
    """As a recording has them: tuples are lists there."""
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(messages or []))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        detail = f"the environment gave {messages!r:.300}, which cannot be recorded (buffer.turns): {error}"
        raise EpisodeFailed("env_error", detail) from error


def _diverged(what: str, then: Any, now: Any) -> EpisodeFailed:
    detail = f"environment.{what} gave {now!r:.300} where it had given {then!r:.300}: it is not replayable"
    return EpisodeFailed(DIVERGED, detail, Cause(f"environment.{what}: diverged"))
