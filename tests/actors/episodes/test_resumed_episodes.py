"""Real actor processes on a real buffer: one is told to stop amid its answers, another goes on with them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.audit.checks.stored.turns import turns
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.quickstart.build import build_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.run_folder import RunFolder
from asyncrl.weights.local.shm import ShmPublisher
from tests.actors.roles import Roles, batch

SLOTS = 8


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    tokenizer = build_tokenizer()
    for part in (build_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "model")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            # One long answer: the pad token, the only one to end it, is hardly ever sampled.
            "env": {"max_turns": 1, "max_tokens": 250},
            "actors": {
                "slots": SLOTS, "max_new_tokens": 200, "stop_token_ids": [0], "drain_s": 0.1,
            },
            "learner": {"groups_per_step": 4, "group_size": 4, "steps": 50},
            "buffer": {"capacity": 64, "max_staleness": 4, "keep": "all", "turns": "on"},
            "eval": {"tasks": 0},
        }
    )  # fmt: skip
    folder = RunFolder.create(tmp_path / "run", config)
    yield folder
    folder.remove_temporary()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(300)
def test_what_one_actor_began_another_ends_behind_the_same_tokens(run: RunFolder) -> None:
    models = [build_model(build_tokenizer(), seed=seed) for seed in (3, 4)]
    publisher = ShmPublisher(run.shm)
    client = BufferClient(run.address("buffer"), identity="learner", deadline_s=60)
    with Roles(run) as roles, closing(client) as learner:
        roles.start("asyncrl.buffer")
        first = roles.start("asyncrl.actors", "--name", "actor-0")
        start = learner.start(0, 0, None)

        def publish(version: int) -> None:
            id = publisher.publish(start.branch, version, models[version].named_parameters())
            learner.published(start.incarnation, start.branch, version, id.digest)

        publish(0)
        batch(learner, start.incarnation, 0, 240.0)  # on a busy machine torch takes a minute to start
        learner.finished(start.incarnation, 0, "applied")
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0, roles.log(first)
        assert not learner.status()["leases"]

        publish(1)
        roles.start("asyncrl.actors", "--name", "actor-1")
        joined = []
        for b in range(1, 4):
            for t in batch(learner, start.incarnation, b).trajectories:
                (row,) = t.rows
                versions = row.versions[row.mask].tolist()
                if t.actor == "actor-1" and versions[0] == 0:
                    joined.append(t)
                    assert versions == sorted(versions)
                    assert set(versions) == {0, 1}
                    with torch.no_grad():
                        ids = torch.from_numpy(row.token_ids.copy())[None].long()
                        expected = [torch.log_softmax(m(ids).logits[0], -1)[:-1].numpy() for m in models]
                    for i in np.flatnonzero(row.mask):
                        judge = expected[row.versions[i]][i - 1, row.token_ids[i]]
                        assert abs(judge - row.logprobs[i]) < 1e-4
            learner.finished(start.incarnation, b, "applied")
    ledger = read_ledger(run.ledger(run.load_config()))
    with closing(PayloadFiles(run.ledger(run.load_config()) / "payloads")) as files:
        assert list(turns(ledger, files.read)) == []

    forms = [(row["form"], row["ended"]) for row in ledger.tables["turns"] if row["attempt"] == 0]
    interrupted = [ended for form, ended in forms if form == "partial"]
    assert interrupted == ["longer"] * len(joined)
    assert 0 < len(joined) <= SLOTS
