"""Real actor processes on a real buffer: one is killed in the middle of long episodes, another goes on with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.audit.checks.stored.turns import turns
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Trajectory
from asyncrl.weights.local.shm import ShmPublisher
from tests.actors.roles import Roles, batch
from tests.counting_env import TURNS, carried_out, sampled_again
from tests.waiting import until

START_S = 240.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    tokenizer = build_tokenizer()
    for part in (build_model(tokenizer, positions=512), tokenizer):
        part.save_pretrained(tmp_path / "model")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "env": {
                "name": "tests.counting_env:WithSnapshots", "options": {"log": str(tmp_path / "steps.log")},
                "max_turns": TURNS, "max_tokens": 512,
            },
            "actors": {"slots": 4, "max_new_tokens": 8, "drain_s": 0.2},
            "learner": {"groups_per_step": 1, "group_size": 4, "steps": 50},
            "buffer": {"capacity": 64, "max_staleness": 4, "keep": "all", "turns": "on", "lease_s": 3.0},
            "eval": {"tasks": 0},
        }
    )  # fmt: skip
    folder = RunFolder.create(tmp_path / "run", config)
    yield folder
    folder.remove_temporary()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
def test_killed_actors_and_a_killed_buffer_cost_no_turn(run: RunFolder, tmp_path: Path) -> None:
    publisher, log = ShmPublisher(run.shm), tmp_path / "steps.log"
    client = BufferClient(run.address("buffer"), identity="learner", deadline_s=60)
    with Roles(run) as roles, closing(client) as learner:
        buffer = roles.start("asyncrl.buffer")
        actor = roles.start("asyncrl.actors", "--name", "actor-0")
        start = learner.start(0, 0, None)
        id = publisher.publish(start.branch, 0, build_model(build_tokenizer(), seed=3).named_parameters())
        learner.published(start.incarnation, start.branch, 0, id.digest)

        for kill, name in enumerate(("actor-1", "actor-2", "actor-3")):
            # Six turns of four episodes after each kill: the middle, wherever each of them is.
            enough = len(carried_out(log)) + 4 * 6
            assert until(lambda enough=enough: len(carried_out(log)) >= enough, START_S), roles.log(actor)
            if kill == 1:
                buffer.kill()
                buffer.wait(10)
                roles.start("asyncrl.buffer")
                continue
            actor.kill()
            actor.wait(10)
            actor = roles.start("asyncrl.actors", "--name", name)
        trajectories: list[Trajectory] = []
        for b in range(2):
            trajectories += batch(learner, start.incarnation, b, START_S).trajectories
            learner.finished(start.incarnation, b, "applied")
        counts = learner.status()["turns"]
    for t in trajectories:
        assert [turn.reward for turn in t.turn_rewards] == [float(n) for n in range(1, TURNS + 1)], t.id
        assert t.turns == TURNS
    assert len(trajectories) == 8
    assert any(t.attempt for t in trajectories), "some episodes went on in another attempt"
    assert sampled_again(carried_out(log)) == 0, "no token was sampled twice"
    assert counts["continued"]
    assert counts.keys() <= {"continued", "kept"}
    ledger = read_ledger(run.ledger(run.load_config()))
    with closing(PayloadFiles(run.ledger(run.load_config()) / "payloads")) as files:
        assert list(turns(ledger, files.read)) == []
