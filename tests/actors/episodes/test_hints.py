"""What a trajectory tells a teacher that is the policy itself: the task's answer, or the environment's last words."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.actors.envs.protocol import Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.hints import Hints
from asyncrl.actors.episodes.progress import Progress
from asyncrl.config import Config
from asyncrl.data.sources.lookup import LookupSource
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.first_tasks import check_first_tasks
from asyncrl.trajectory import MAX_HINT, Ticket, TicketId, Trajectory
from asyncrl.wire import WireError, decode_trajectory, encode_trajectory, pack, unpack
from tests.actors.episodes.playing import LIMITS, saying
from tests.actors.fakes import FakeEnv, FakeRenderer
from tests.actors.fakes import ticket as played
from tests.learner.step.test_train_step import episodes


def hints(**teacher: Any) -> Hints:
    found = Hints.named(Config.model_validate({"learner": {"teacher": {"path": "policy"} | teacher}}))
    assert found is not None
    return found


def ticket(task: dict[str, Any], kind: Any = "train") -> Ticket:
    return Ticket(TicketId(0, 0, 0), 0, kind, task, (0, 0), 1, 1.0, 0, 60.0)


def test_what_is_shown() -> None:
    task = {"id": "t", "prompt": "?", "answer": "41", "steps": {"b": 1, "a": [2]}}
    assert hints().of(ticket(task), "wrong") == "41"
    assert hints(answer_field="steps").of(ticket(task), "wrong") == '{"a": [2], "b": 1}'
    assert hints(shown="feedback").of(ticket(task), "wrong") == "wrong"
    assert hints(shown="feedback").of(ticket(task), "") == ""
    assert hints().of(ticket(task, "eval"), "wrong") == ""
    assert len(hints(shown="feedback").of(ticket(task), "x" * (MAX_HINT + 1))) == MAX_HINT
    assert Hints.named(Config()) is None
    assert Hints.named(Config.model_validate({"learner": {"teacher": {"path": "quickstart"}}})) is None


def test_a_task_without_the_field_fails_by_name() -> None:
    with pytest.raises(EpisodeFailed, match=r"task t has no solution, which .*keys are id, prompt.*answer_field"):
        hints(answer_field="solution").of(ticket({"id": "t", "prompt": "?"}), "")


def test_the_environments_last_words() -> None:
    """Of the turn that ends the episode, also where another answered before."""

    words = [{"role": "user", "content": "wrong"}, {"role": "user", "content": "quite"}]

    async def feedback(last: Turn) -> str:
        env = FakeEnv([Turn(messages=words[:1]), last])
        made = await play(played(2), lambda: env, saying("a", "b"), FakeRenderer(), LIMITS, Progress(0.0))
        return made.feedback

    assert asyncio.run(feedback(Turn(messages=words, done=True))) == "wrong\nquite"
    assert asyncio.run(feedback(Turn(done=True))) == "", "an environment that ends without a word"


def test_the_first_tasks_are_checked() -> None:
    config = Config.model_validate({"learner": {"teacher": {"path": "policy", "answer_field": "solution"}}})
    source = LookupSource(seed=0)
    with pytest.raises(ConfigError, match=r"has no solution, which learner\.teacher\.shown shows .*answer_field, or"):
        check_first_tasks(config, source)
    good = Config.model_validate({"learner": {"teacher": {"path": "policy"}}})
    assert check_first_tasks(good, source)[1] == []


def test_it_travels_and_is_part_of_the_digest() -> None:
    plain = episodes()[0]
    t = replace(plain, hint="41")
    came = decode_trajectory(encode_trajectory(t))
    assert came.hint == "41"
    assert came.digest() == t.digest() != plain.digest()
    assert decode_trajectory(encode_trajectory(plain)).digest() == plain.digest()


def test_a_hint_that_is_too_long_is_refused() -> None:
    header, *rows = encode_trajectory(episodes()[0])
    long = pack(unpack(header) | {"hint": "x" * (MAX_HINT + 1)})
    with pytest.raises(WireError, match="hint"):
        decode_trajectory([long, *rows])
    assert isinstance(decode_trajectory([header, *rows]), Trajectory)
