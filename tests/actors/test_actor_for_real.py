"""The real actor process with the real buffer process; the test plays the learner."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.weights.local.shm import ShmPublisher
from tests.actors.roles import Process, Roles, batch

GROUPS, SIZE = 4, 4


@dataclass
class Stage:
    folder: RunFolder
    roles: Roles
    buffer: Process
    actor: Process


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    tokenizer = build_tokenizer()
    for part in (build_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "model")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "env": {"max_turns": 3, "max_tokens": 160, "name": getattr(request, "param", "lookup")},
            "actors": {"slots": 8, "max_new_tokens": 24, "drain_s": 1.0},
            "learner": {"groups_per_step": GROUPS, "group_size": SIZE, "steps": 50},
            "buffer": {"capacity": 64, "max_staleness": 1},
            "eval": {"tasks": 3, "greedy": True},
        }
    )
    folder = RunFolder.create(tmp_path / "run", config)
    with Roles(folder) as roles:
        buffer = roles.start("asyncrl.buffer")
        yield Stage(folder, roles, buffer, roles.start("asyncrl.actors", "--name", "actor-0"))
    folder.remove_temporary()


@pytest.mark.system
@pytest.mark.parametrize("stage", ["lookup", "examples/agent_openai.py:agent"], indirect=True)
def test_what_arrives_is_what_the_published_weights_sampled(stage: Stage) -> None:
    run = stage.folder
    config = run.load_config()
    publisher = ShmPublisher(run.shm)
    learner = BufferClient(run.address("buffer"), identity="learner", deadline_s=60)
    models = [build_model(build_tokenizer(), seed=seed) for seed in (3, 4)]
    start = learner.start(0, 0, None)
    stored: dict[tuple[int, int], str] = {}

    def publish(version: int) -> None:
        id = publisher.publish(start.branch, version, models[version].named_parameters())
        learner.published(start.incarnation, start.branch, version, id.digest)

    publish(0)
    learner.evaluate((start.branch, 0))
    for b in range(3):
        reply = batch(learner, start.incarnation, b)
        assert len(reply.trajectories) == GROUPS * SIZE
        for t in reply.trajectories:
            stored[t.id.group, t.id.index] = t.digest()
            assert t.oldest_version >= b - config.buffer.max_staleness
            for row in t.rows:
                assert len(row) <= config.env.max_tokens
                with torch.no_grad():
                    logits = [m(torch.from_numpy(row.token_ids.copy())[None].long()).logits[0] for m in models]
                expected = [torch.log_softmax(x, -1)[:-1].numpy() for x in logits]
                for i in np.flatnonzero(row.mask):
                    judge = expected[min(int(row.versions[i]), 1)][i - 1, row.token_ids[i]]
                    assert abs(judge - row.logprobs[i]) < 1e-4
        learner.finished(start.incarnation, b, "applied")
        if b == 0:
            publish(1)
            continue
        models.append(models[1])
        publish(b + 1)
    assert learner.evaluation().done

    stage.actor.send_signal(signal.SIGTERM)
    assert stage.actor.wait(60) == 0, stage.roles.log(stage.actor)
    lines = [json.loads(line) for line in (run.acks / "actor-0.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "group" in line]
    acknowledged = {(line["group"], line["index"]): line["digest"] for line in lines}
    assert len(acknowledged) == len(lines)
    assert stored.items() <= acknowledged.items()
    learner.stop()
    assert stage.buffer.wait(60) == 0
    learner.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["tests.actors.stuck_env:StuckEnv"], indirect=True)
def test_a_tool_that_never_returns_does_not_hold_up_the_end(stage: Stage) -> None:
    run = stage.folder
    learner = BufferClient(run.address("buffer"), identity="learner", deadline_s=60)
    start = learner.start(0, 0, None)
    id = ShmPublisher(run.shm).publish(0, 0, build_model(build_tokenizer()).named_parameters())
    learner.published(start.incarnation, start.branch, 0, id.digest)
    deadline = time.monotonic() + 60
    while not learner.status()["leases"] and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    stage.actor.send_signal(signal.SIGTERM)
    assert stage.actor.wait(60) == 0
    assert "did not return: left behind" in stage.roles.log(stage.actor)
    assert not learner.status()["leases"], "its tickets were not given back"
    learner.close()
