"""An episode that is cut anywhere, and goes on from its recording, is the episode that was not cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.recorded.recording import Revoked
from asyncrl.actors.episodes.resumption import Interrupted
from asyncrl.actors.leases import Patience
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.turns import Recorded, RecordedReset, RecordedSample, successors
from asyncrl.wire.turns import tools_digest
from tests.actors.episodes.recorded.counters import Counter, Replayable, Snapshots, Sparse
from tests.actors.episodes.recorded.recordings import LIMITS, PureEngine, Recorder, played, playing
from tests.actors.fakes import FakeRenderer

COMPACTING = replace(LIMITS, compact=0.15, compact_request="sum up")


def same(a: Trajectory, b: Trajectory) -> None:
    assert a.digest() == b.digest()
    assert (a.turn_records, a.turn_rewards, a.rewards, a.metrics) == (
        b.turn_records,
        b.turn_rewards,
        b.rewards,
        b.metrics,
    )
    assert (a.turns, a.stop_reason, len(a.rows)) == (b.turns, b.stop_reason, len(b.rows))


def goes_on(make: Any, cut: int, limits: Any = LIMITS) -> None:
    """Cut behind `cut` records, and again behind every later one."""
    whole = Recorder()
    undisturbed, engine, _ = played(make, whole, limits=limits)
    sampled = len(engine.said)
    chain = list(whole.carried(cut))
    more = Recorder()
    resumed, engine, progress = played(make, more, chain, limits=limits)
    same(undisturbed, resumed)
    given = sum(len(record.token_ids) for record in chain if isinstance(record, RecordedSample))
    assert len(engine.said) == sampled - given, "what was recorded is not sampled again"
    assert progress.tokens == undisturbed.num_policy_tokens
    assert [r.place for r in [*chain, *more.records]] == [r.place for r in whole.records]


@pytest.mark.parametrize("env", [Replayable, Snapshots, Sparse], ids=lambda env: env.__name__)
@pytest.mark.parametrize("role", ["tool", "user"], ids=["one row", "a row a turn"])
@given(cut=st.integers(0, 12))
@settings(max_examples=13, deadline=None)
def test_an_episode_goes_on_where_it_was_cut(env: type[Counter], role: str, cut: int) -> None:
    goes_on(lambda: env(role=role), cut)


@given(cut=st.integers(0, 14))
@settings(max_examples=15, deadline=None)
def test_an_episode_with_summaries_goes_on_where_it_was_cut(cut: int) -> None:
    goes_on(lambda: Snapshots(5, "user"), cut, COMPACTING)


def test_the_summaries_are_there() -> None:
    recorder = Recorder()
    trajectory, _, _ = played(lambda: Snapshots(5, "user"), recorder, limits=COMPACTING)
    summaries = [r for r in recorder.records if isinstance(r, RecordedSample) and r.summary]
    assert summaries
    assert trajectory.turns == 5 + len(summaries)


def test_records_follow_one_another_and_the_last_answer_is_the_trajectory_s() -> None:
    recorder = Recorder()
    played(Snapshots, recorder)
    last: Recorded | None = None
    for record in recorder.records:
        assert record.place in successors(None if last is None else (last.place[0], last.form))
        last = record
    asked_and_answered = [place for turn in range(6) for place in [(turn, False), (turn, True)]]
    assert [r.place for r in recorder.records] == [(-1, True), *asked_and_answered[:-1]]


@pytest.mark.parametrize(("env", "again"), [(Snapshots, 0), (Sparse, 1), (Replayable, 4)])
def test_the_environment_steps_only_what_its_state_lacks(env: type[Counter], again: int) -> None:
    recorder = Recorder()
    played(env, recorder)
    env.carried_out = 0
    played(env, Recorder(), recorder.carried(9))  # the reset, and four turns with their answers
    assert env.carried_out == again + 2


def test_an_action_without_an_answer_is_carried_out_once_in_the_state() -> None:
    recorder = Recorder()
    played(Snapshots, recorder)
    made: list[Snapshots] = []

    def make() -> Snapshots:
        made.append(Snapshots())
        return made[-1]

    trajectory, engine, _ = played(make, Recorder(), recorder.carried(10))  # the intent of turn 4 is the last
    assert len(made[-1].heard) == 6
    assert trajectory.metrics["heard"] == 6
    assert len(engine.said) == 4, "only the last turn is sampled"


def test_an_environment_that_answers_otherwise_ends_the_attempt() -> None:
    class Drifting(Replayable):
        drift = ""

        async def step(self, message: Any) -> Any:
            turn = await super().step(message)
            return replace(turn, messages=[{"role": "tool", "content": self.drift + str(turn.messages)}])

    recorder = Recorder()
    played(Drifting, recorder)
    Drifting.drift = "other "
    with pytest.raises(EpisodeFailed, match="not replayable") as raised:
        played(Drifting, Recorder(), recorder.carried(5))
    assert raised.value.reason == "env_diverged"
    assert "other" in raised.value.detail


def test_a_replayable_environment_that_begins_otherwise_ends_the_attempt() -> None:
    class Other(Replayable):
        reset_state = "elsewhere"

    recorder = Recorder()
    played(Replayable, recorder)
    with pytest.raises(EpisodeFailed, match=r"environment\.reset gave"):
        played(Other, Recorder(), recorder.carried(5))


class OtherWords(FakeRenderer):
    """Renders what stands behind the first row otherwise, as another template would."""

    def render_tail(self, *args: Any, **options: Any) -> list[int] | None:
        tail = super().render_tail(*args, **options)
        return None if tail is None else [*tail, 33]


def test_another_prompt_begins_the_episode_again_and_is_counted() -> None:
    recorder, again = Recorder(), Recorder()
    played(Snapshots, recorder)
    fresh, _, _ = played(Snapshots, Recorder(), renderer=OtherWords())
    resumed, engine, progress = played(Snapshots, again, recorder.carried(7), renderer=OtherWords())
    same(fresh, resumed)
    assert progress.begun_again == 1
    assert progress.tokens == resumed.num_policy_tokens
    assert len(engine.said) == resumed.num_policy_tokens
    assert isinstance(again.records[0], RecordedReset), "the new recording takes the place of the old one"
    assert len(again.records) == 12


def test_other_tools_begin_the_episode_again() -> None:
    recorder = Recorder()
    played(Snapshots, recorder)
    carried = recorder.carried(7)
    assert isinstance(carried[0], RecordedReset)
    other = replace(carried[0], tools=tools_digest([{"type": "function"}]))
    _, _, progress = played(Snapshots, Recorder(), (other, *carried[1:]))
    assert progress.begun_again == 1


@pytest.mark.parametrize("after", range(12))
def test_a_revoked_attempt_ends_before_it_steps(after: int) -> None:
    Snapshots.carried_out = 0
    recorder = Recorder(error=Revoked("intent"), after=after)
    with pytest.raises(EpisodeFailed) as raised:
        played(Snapshots, recorder)
    assert raised.value.reason == "", "the buffer expects no answer"
    stored = sum(isinstance(record, RecordedSample) for record in recorder.records)
    assert Snapshots.carried_out == stored, "each step that was made had its intent stored"


def test_without_durability_nothing_is_recorded_and_nothing_is_played() -> None:
    recorder = Recorder()
    undisturbed, _, _ = played(Snapshots, recorder)
    same(undisturbed, played(Snapshots, None, recorder.carried(7))[0])
    _, engine, _ = played(Snapshots, None, recorder.carried(7))
    assert len(engine.said) == undisturbed.num_policy_tokens


def test_an_environment_that_cannot_go_on_records_nothing() -> None:
    recorder = Recorder()
    played(Counter, recorder)
    assert recorder.records == []


def test_an_environment_that_is_told_learns_the_action_that_was_interrupted() -> None:
    told: list[Any] = []

    class Told(Counter):
        async def reset(self, task: Any, interrupted: Any = None) -> Any:
            told.append(interrupted)
            return await super().reset(task)

    recorder = Recorder()
    undisturbed, engine, _ = played(Told, recorder)
    resumed, again, _ = played(Told, Recorder(), recorder.carried(8))  # the last is intent 3
    same(undisturbed, resumed)
    assert len(again.said) == len(engine.said), "it begins again"
    played(Told, Recorder(), recorder.carried(9))
    assert [message and message["content"] for message in told] == [None, told[1]["content"], None]
    assert told[1]["content"]


def test_a_snapshot_that_is_too_large_says_so() -> None:
    with pytest.raises(EpisodeFailed, match=r"environment\.snapshot: it gave 7 bytes, at most 5.*buffer\.turn_max_kb"):
        played(Snapshots, Recorder(), limits=replace(LIMITS, max_snapshot=5))


def test_what_no_message_can_carry_says_so() -> None:
    class Odd(Replayable):
        async def step(self, message: Any) -> Any:
            turn = await super().step(message)
            return replace(turn, messages=[{"role": "tool", "content": "x", "handle": object()}])

    recorder = Recorder()
    played(Replayable, recorder)
    with pytest.raises(EpisodeFailed, match=r"cannot be recorded \(buffer.turns\)"):
        played(Odd, Recorder(), recorder.carried(4))


class Cutting(PureEngine):
    """Gives two tokens of turn `turn` when it is aborted."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self._turn, self.aborted = turn, asyncio.Event()

    async def generate(self, request: str, prompt: Any, sampling: Any) -> Any:
        made = await super().generate(request, prompt, sampling)
        if not request.endswith(f"/{self._turn}"):
            return made
        del self.said[-2:]
        await self.aborted.wait()
        return replace(made.first(2), stop_reason="abort")

    async def abort(self, request: str) -> None:
        self.aborted.set()


async def cut(env: type[Counter], turn: int, recorder: Recorder) -> tuple[Progress, int]:
    """An actor leaves during turn `turn`; the tokens that it has sampled."""
    progress, engine = Progress(0.0), Cutting(turn)
    task = asyncio.ensure_future(playing(env, recorder, engine=engine, progress=progress))
    while len(engine.calls) <= turn:  # noqa: ASYNC110
        await asyncio.sleep(0)
    if progress.interruptible:
        progress.interrupted = True
    await engine.abort("")
    with pytest.raises(Interrupted if progress.interrupted else EpisodeFailed):
        await asyncio.wait_for(task, 20)
    return progress, len(engine.said)


@pytest.mark.parametrize(("env", "turn"), [(Snapshots, 0), (Snapshots, 3), (Replayable, 3), (Counter, 0)])
def test_an_interrupted_turn_goes_on_behind_its_tokens(env: type[Counter], turn: int) -> None:
    undisturbed, engine, _ = played(env, Recorder())
    whole, recorder = len(engine.said), Recorder()
    progress, sampled = asyncio.run(cut(env, turn, recorder))
    assert progress.handed_over
    last = recorder.records[-1]
    assert isinstance(last, RecordedSample)
    assert (last.partial, last.number, len(last.token_ids)) == (True, turn, 2)
    resumed, engine, after = played(env, Recorder(), recorder.carried(100))
    assert resumed.digest() == undisturbed.digest()
    assert sampled + len(engine.said) == whole, "no token is sampled twice"
    assert after.begun_again == 0


def test_a_turn_that_nobody_could_continue_is_not_interrupted() -> None:
    recorder = Recorder()
    progress, _ = asyncio.run(cut(Counter, 3, recorder))
    assert not progress.interrupted
    assert recorder.records == []


def test_an_actor_that_leaves_begins_no_further_turn() -> None:
    class Leaving(Snapshots):
        async def step(self, message: Any) -> Any:
            progress.interrupted = len(self.heard) == 2
            return await super().step(message)

    class Slow(Recorder):
        async def keep(self, record: Recorded) -> bool:
            await asyncio.sleep(0.05)
            return await super().keep(record)

    progress, recorder = Progress(0.0), Slow()
    with pytest.raises(Interrupted):
        played(Leaving, recorder, progress=progress)
    assert recorder.records[-1].place == (2, True), "its last answer is recorded"
    assert progress.tokens == progress.kept_tokens == 12


def test_a_state_without_a_snapshot_is_stepped_again_only_from_the_same_reset() -> None:
    class Changing(Sparse):
        words = "count"

        async def snapshot(self) -> Any:
            return None

        async def reset(self, task: Any) -> Any:
            return [{"role": "system", "content": self.words}]

    recorder = Recorder()
    played(Changing, recorder)
    Changing.words = "add up"
    with pytest.raises(EpisodeFailed, match=r"environment\.reset gave"):
        played(Changing, Recorder(), recorder.carried(3))


def test_what_is_stepped_again_is_progress_and_no_part_of_the_longest_episode() -> None:
    clock = {"now": 0.0}
    given_up: list[str] = []

    class Slow(Replayable):
        async def step(self, message: Any) -> Any:
            clock["now"] += 100.0
            given_up.append(Patience(1e9, 150.0, 450.0).exhausted(clock["now"], progress, 0.0))
            return await super().step(message)

    recorder = Recorder()
    progress = Progress(0.0, clock=lambda: clock["now"])
    undisturbed, _, _ = played(Replayable, recorder)
    resumed, _, _ = played(Slow, Recorder(), recorder.carried(9), progress=progress)
    assert resumed.digest() == undisturbed.digest()
    assert given_up == [""] * 6, "four steps again, and two new ones"
    assert progress.again_s == 400.0


def test_what_was_counted_is_not_counted_again() -> None:
    class Breaking(FakeRenderer):
        """Changes earlier tokens at every turn."""

        def render_tail(self, *args: Any, **options: Any) -> list[int] | None:
            return None

    recorder = Recorder()
    _, _, first = played(Snapshots, recorder, renderer=Breaking())
    _, _, second = played(Snapshots, Recorder(), recorder.carried(7), renderer=Breaking())
    assert (first.prefix_breaks, first.tools.times) == (5, {"count": 5})
    assert (second.prefix_breaks, second.tools.times) == (2, {"count": 2})
    recorder = Recorder()
    make, limits = (lambda: Snapshots(5, "user")), COMPACTING
    _, _, first = played(make, recorder, limits=limits)
    summaries = sum(isinstance(r, RecordedSample) and r.summary for r in recorder.records)
    _, _, second = played(make, Recorder(), recorder.carried(100), limits=limits)
    assert first.compactions == summaries
    assert (second.compactions, second.compacted_from, second.compacted_to) == (0, 0, 0)


def test_more_kept_ids_than_are_kept_now_begin_the_episode_again() -> None:
    recorder = Recorder()
    played(Snapshots, recorder)
    kept = KeptIds(np.array([3, 0, 0, 0], np.uint16), np.array([97, 98, 99], np.int32))
    carried = [replace(r, kept=kept) if isinstance(r, RecordedSample) else r for r in recorder.carried(5)]

    class Keeping(PureEngine):
        async def generate(self, request: str, prompt: Any, sampling: Any) -> Any:
            made = await super().generate(request, prompt, sampling)
            n = len(made.token_ids)
            return replace(made, kept=KeptIds(np.zeros(n, np.uint16), np.zeros(0, np.int32)))

    for most, again in ((3, 0), (2, 1)):
        limits = replace(LIMITS, top_k=3, max_kept=most)
        _, _, progress = played(Snapshots, Recorder(), carried, limits=limits, engine=Keeping())
        assert progress.begun_again == again


def test_an_interrupted_first_sample_goes_on_where_the_environment_would_be_told() -> None:
    class Told(Counter):
        async def reset(self, task: Any, interrupted: Any = None) -> Any:
            return await super().reset(task)

    undisturbed, engine, _ = played(Told, Recorder())
    whole, recorder, rest = len(engine.said), Recorder(), Recorder()
    _, sampled = asyncio.run(cut(Told, 0, recorder))
    assert [r.form for r in recorder.records] == ["reset", "partial"]
    resumed, engine, _ = played(Told, rest, recorder.carried(100))
    assert resumed.digest() == undisturbed.digest()
    assert sampled + len(engine.said) == whole, "no token is sampled twice"
    assert rest.records[0].place == (0, False)


@pytest.mark.parametrize("room", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("env", [Replayable, Snapshots], ids=lambda env: env.__name__)
def test_without_room_on_the_disk_an_episode_goes_on_and_records_nothing_more(env: type[Counter], room: int) -> None:
    undisturbed, _, _ = played(env, Recorder())
    recorder = Recorder(room=room)
    trajectory, _, progress = played(env, recorder)
    same(undisturbed, trajectory)
    assert (len(recorder.records), recorder.full) == (room, 1)
    stored = [record for record in recorder.records if isinstance(record, RecordedSample)]
    assert progress.kept_tokens == sum(len(record.token_ids) for record in stored)
    # The next attempt goes on where the records end, and records the rest.
    more = Recorder()
    resumed, engine, _ = played(env, more, recorder.carried(room))
    same(undisturbed, resumed)
    assert len(engine.calls) == undisturbed.turns - len(stored)
    assert len(more.records) == 2 * undisturbed.turns - room


def test_without_room_no_snapshot_is_made() -> None:
    class Noting(Snapshots):
        made = 0

        async def snapshot(self) -> bytes | None:
            type(self).made += 1
            return await super().snapshot()

    played(Noting, Recorder(room=2))
    assert Noting.made == 2, "of the reset, and of the answer that found no room"
