"""Agents whose turns are durable: what is recorded of an episode, and how one that was interrupted goes on from it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.engines.protocol import Generation, Sampling
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.recorded.recording import Revoked
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory.kept_ids import KeptIds
from asyncrl.trajectory.sampled_turns import turn_digest
from asyncrl.trajectory.turns import DIVERGED, RecordedReset, RecordedSample
from tests.actors.endpoint.playing import LIMITS, USER, ask, encode, played, sampled, text_of
from tests.actors.episodes.recorded.recordings import Recorder
from tests.actors.fakes import FakeEngine

TURNS = 4


class Answers(FakeEngine):
    """Says the number of its request, and which attempt's engine it is: nothing that it says comes twice."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda *_: encode(f"{name}{len(self.calls)}<|im_end|>"), LIMITS.max_tokens)

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        return dataclasses.replace(await super().generate(request, prompt, sampling), queue_s=0.5, prefilled=3)


async def talks(task: Any, client: Any) -> float:
    """Asks four times, each time with what was said before."""
    messages: list[Any] = [USER]
    for _ in range(TURNS):
        said = (await ask(client, messages)).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"you said {said}"}]
    return float(len(messages))


talks.replayable = True  # type: ignore[attr-defined]


def attempt(agent: Any, name: str, recorder: Recorder, carried: int = 0, **options: Any) -> tuple[Trajectory, Any, Any]:
    engine, progress = options.pop("engine", None) or Answers(name), Progress(0.0, keep=recorder.keep)
    turns = recorder.carried(carried)
    recorder.records = recorder.records[:carried]
    return played(agent, engine, turns=turns, progress=progress, **options), engine, progress


def numbers(recorder: Recorder) -> list[tuple[int, str]]:
    return [(record.place[0], record.form) for record in recorder.records]


@pytest.mark.parametrize("carried", [0, 2, TURNS])
def test_an_interrupted_agent_is_called_again_and_gets_its_recorded_replies(carried: int) -> None:
    recorder = Recorder()
    first, _, progress = attempt(talks, "a", recorder)
    assert numbers(recorder) == [(n, "summary") for n in range(TURNS)]
    assert progress.kept_tokens == progress.tokens == first.num_policy_tokens
    second, engine, progress = attempt(talks, "b", recorder, carried)
    assert len(engine.calls) == TURNS - carried, "what was recorded is not sampled again"
    (row,) = second.rows
    said = [f"a{n + 1}" for n in range(carried)] + [f"b{n + 1}" for n in range(TURNS - carried)]
    assert sampled(row).split("<|im_end|>")[:-1] == said
    assert (second.turns, second.reward, second.stop_reason) == (TURNS, first.reward, "done")
    assert numbers(recorder) == [(n, "summary") for n in range(TURNS)]
    records = [record for record in recorder.records if isinstance(record, RecordedSample)]
    assert [record.digest() for record in records] == [turn_digest(second, n) for n in range(TURNS)]
    assert progress.kept_tokens == progress.tokens
    times = [(record.queue, record.prefilled, record.sampled) for record in second.turn_records]
    assert times == [(0.5, 3, len(record.token_ids)) for record in records]
    given = first.turn_records[:carried], second.turn_records[:carried]
    assert [r.generate for r in given[0]] == [r.generate for r in given[1]], "the times are those of its sampling"


def test_each_reply_is_stored_before_the_agent_has_it() -> None:
    recorder, stored = Recorder(), []

    async def agent(task: Any, client: Any) -> float:
        for n in range(3):
            await ask(client, [{"role": "user", "content": str(n)}])
            stored.append(len(recorder.records))
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    attempt(agent, "a", recorder)
    assert stored == [1, 2, 3]


def test_equal_requests_get_their_replies_in_the_order_in_which_they_were_given() -> None:
    async def agent(task: Any, client: Any) -> float:
        said = [(await ask(client, [USER])).choices[0].message.content for _ in range(4)]
        seen.append(said)
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, seen = Recorder(), []
    attempt(agent, "a", recorder)
    t, engine, _ = attempt(agent, "b", recorder, 3)
    assert seen == [["a1", "a2", "a3", "a4"], ["a1", "a2", "a3", "b1"]]
    assert len(engine.calls) == 1
    assert t.turns == 4


@pytest.mark.parametrize("declared", [None, False])
def test_an_agent_that_declares_nothing_begins_anew_and_records_nothing(declared: bool | None) -> None:
    async def agent(task: Any, client: Any) -> float:
        return await talks(task, client)

    if declared is not None:
        agent.replayable = declared  # type: ignore[attr-defined]
    recorder = Recorder()
    attempt(talks, "a", recorder)
    t, engine, progress = attempt(agent, "b", recorder, 2)
    assert (len(engine.calls), t.turns, len(recorder.records)) == (TURNS, TURNS, 2)
    assert progress.kept_tokens == 0


def test_another_request_than_the_recorded_one_ends_the_attempt() -> None:
    async def agent(task: Any, client: Any) -> float:
        calls.append(len(calls))
        await ask(client, [USER])
        await ask(client, [USER, {"role": "user", "content": f"call {len(calls)}"}])
        return float((await ask(client, [USER])).choices[0].message.content == "a3")

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, calls = Recorder(), list[int]()
    attempt(agent, "a", recorder)
    with pytest.raises(EpisodeFailed, match=r"it sent a request that it had not sent: it is not replayable") as raised:
        attempt(agent, "b", recorder, 3)
    assert (raised.value.reason, len(calls)) == (DIVERGED, 2)


@pytest.mark.parametrize("asked", [{"max_tokens": 7}, {"stop": ["x"]}, {"seed": 5}])
def test_a_request_that_asks_for_something_else_is_another_one(asked: dict[str, Any]) -> None:
    async def agent(task: Any, client: Any) -> float:
        await ask(client, [USER], **(asked if engines else {}))
        engines.append(1)
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, engines = Recorder(), list[int]()
    attempt(agent, "a", recorder)
    with pytest.raises(EpisodeFailed, match="not replayable"):
        attempt(agent, "b", recorder, 1)


def test_an_agent_that_ends_without_all_its_requests_ends_the_attempt() -> None:
    async def agent(task: Any, client: Any) -> float:
        for _ in range(3 - len(calls)):
            await ask(client, [USER])
        calls.append(1)
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, calls = Recorder(), list[int]()
    attempt(agent, "a", recorder)
    with pytest.raises(EpisodeFailed, match=r"it ended without 1 of its requests: it is not replayable") as raised:
        attempt(agent, "b", recorder, 3)
    assert raised.value.reason == DIVERGED


class Racing(Answers):
    """The conversations that are named in `slow` are answered when the others have been; with `beside`, these are not
    before both run."""

    def __init__(self, name: str, slow: Sequence[str], *, beside: bool = False) -> None:
        super().__init__(name)
        self._slow, self._others, self._begun = slow, asyncio.Event(), asyncio.Event()
        if not beside:
            self._begun.set()

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        if any(word in text_of(prompt) for word in self._slow):
            self._begun.set()
            await self._others.wait()
            return await super().generate(request, prompt, sampling)
        await self._begun.wait()
        made = await super().generate(request, prompt, sampling)
        asyncio.get_running_loop().call_later(0.05, self._others.set)
        return made


async def in_parallel(task: Any, client: Any) -> dict[str, float]:
    async def one(word: str) -> float:
        first = (await ask(client, [{"role": "user", "content": word}])).choices[0].message.content
        said = {"role": "assistant", "content": first}
        await ask(client, [{"role": "user", "content": word}, said, {"role": "user", "content": "go on"}])
        return float(len(first))

    return dict(zip("ab", await asyncio.gather(one("fox"), one("owl")), strict=True))


in_parallel.replayable = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("carried", [1, 3])
@pytest.mark.parametrize(("before", "now"), [("fox", "owl"), ("owl", "fox"), ("fox", "fox")])
def test_parallel_requests_may_come_in_another_order(before: str, now: str, carried: int) -> None:
    recorder = Recorder()
    attempt(in_parallel, "a", recorder, engine=Racing("a", [before], beside=True))
    assert recorder.records[0].beside == 1  # type: ignore[attr-defined]
    t, engine, _ = attempt(in_parallel, "b", recorder, carried, engine=Racing("b", [now] if carried < 2 else []))
    assert (len(engine.calls), t.turns, len(t.rows)) == (4 - carried, 4, 2)
    records = [record for record in recorder.records if isinstance(record, RecordedSample)]
    assert [record.number for record in records] == list(range(4))
    assert [record.digest() for record in records] == [turn_digest(t, n) for n in range(4)]


def test_a_parallel_agent_that_leaves_a_request_out_ends_the_attempt() -> None:
    async def agent(task: Any, client: Any) -> float:
        words = ["fox", "owl"] if not calls else ["fox", "hen"]
        calls.append(1)
        await asyncio.gather(*(ask(client, [{"role": "user", "content": word}]) for word in words))
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, calls = Recorder(), list[int]()
    attempt(agent, "a", recorder, engine=Racing("a", ["fox"], beside=True))
    with pytest.raises(EpisodeFailed, match="without 1 of its requests"):
        attempt(agent, "b", recorder, 2)


def test_behind_several_choices_of_one_request_nothing_is_recorded() -> None:
    async def agent(task: Any, client: Any) -> float:
        first = (await ask(client, [USER])).choices[0].message.content
        await ask(client, [USER], n=2)
        await ask(client, [USER, {"role": "user", "content": first}])
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder = Recorder()
    attempt(agent, "a", recorder)
    assert numbers(recorder) == [(0, "summary")]
    t, engine, _ = attempt(agent, "b", recorder, 1)
    assert (len(engine.calls), t.turns, numbers(recorder)) == (3, 3, [(0, "summary")])
    assert recorder.records[0].digest() == turn_digest(t, 0)  # type: ignore[attr-defined]


def test_a_reply_is_recorded_as_it_was_cut_at_a_stop_string() -> None:
    async def agent(task: Any, client: Any) -> float:
        said = (await ask(client, [USER], stop=["9"])).choices[0]
        seen.append((said.message.content, said.finish_reason))
        await ask(client, [USER])
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, seen = Recorder(), list[tuple[str, str]]()

    def engine() -> FakeEngine:
        return FakeEngine(lambda *_: encode("12 9 34<|im_end|>"), LIMITS.max_tokens)

    first, *_ = attempt(agent, "a", recorder, engine=engine())
    second, *_ = attempt(agent, "b", recorder, 1, engine=engine())
    assert seen[0] == seen[1]
    for t in (first, second):
        assert recorder.records[0].digest() == turn_digest(t, 0)  # type: ignore[attr-defined]


def test_replies_of_other_sampling_are_recorded_anew_from_the_start() -> None:
    recorder = Recorder()
    attempt(talks, "a", recorder)
    truncated = dataclasses.replace(LIMITS, top_p=0.5, max_kept=4)

    class Kept(Answers):
        async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
            made = await super().generate(request, prompt, sampling)
            return dataclasses.replace(made, kept=KeptIds(np.ones(len(made.token_ids), np.uint16), made.token_ids))

    turns, progress = recorder.carried(2), Progress(0.0, keep=recorder.keep)
    recorder.records.clear()
    engine = Kept("b")
    t = played(talks, engine, truncated, turns=turns, progress=progress)
    assert (len(engine.calls), t.turns, progress.begun_again) == (TURNS, TURNS, 1)
    assert isinstance(recorder.records[0], RecordedReset), "what is recorded from here takes its place"
    assert numbers(recorder)[1:] == [(n, "summary") for n in range(TURNS)]


def test_a_revoked_attempt_ends_before_the_agent_has_the_reply() -> None:
    async def agent(task: Any, client: Any) -> float:
        for _ in range(2):
            await ask(client, [USER])
            seen.append(1)
        return 1.0

    agent.replayable = True  # type: ignore[attr-defined]
    recorder, seen = Recorder(error=Revoked("intent 1"), after=1), list[int]()
    with pytest.raises(Revoked):
        attempt(agent, "a", recorder)
    assert len(seen) == 1


@pytest.mark.parametrize("room", [0, 2])
def test_without_room_on_the_disk_an_agent_goes_on_and_records_nothing_more(room: int) -> None:
    recorder = Recorder(room=room)
    t, _, progress = attempt(talks, "a", recorder)
    assert (t.turns, len(recorder.records), recorder.full) == (TURNS, room, 1)
    assert progress.kept_tokens == sum(len(r.token_ids) for r in recorder.records)  # type: ignore[attr-defined]
    recorder.room = 9
    again, engine, _ = attempt(talks, "b", recorder, room)
    assert (again.turns, len(engine.calls)) == (TURNS, TURNS - room)
    assert numbers(recorder) == [(n, "summary") for n in range(TURNS)]


def test_a_plain_function_goes_on_too() -> None:
    def agent(task: Any, client: Any) -> float:
        return float(len([ask(client, [USER]) for _ in range(3)]))

    agent.replayable = True  # type: ignore[attr-defined]
    recorder = Recorder()
    attempt(agent, "a", recorder)
    t, engine, _ = attempt(agent, "b", recorder, 2)
    assert (len(engine.calls), t.turns, t.reward) == (1, 3, 3.0)
