"""A small run made by the real buffer process and the real learner; only the episodes are made up."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.actors.ack_log import AckLog
from asyncrl.buffer.client import BufferClient
from asyncrl.config.launch import TrackingConfig
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.checkpoints.checkpoints import Checkpoints
from asyncrl.learner.distillation.identity import remember
from asyncrl.learner.loop import Learner
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.samples import Samples
from asyncrl.learner.trainer import Trainer
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts.text import TokenText
from asyncrl.weights.local.shm import ShmPublisher
from tests.buffer.processes import BufferProcess
from tests.learner.distillation.teachers import tokenizer_in
from tests.learner.fake_buffer import FakeReporter
from tests.learner.tiny import random_trajectory, tiny_model, with_turns

STEPS = 4
SECTIONS: dict[str, Any] = {
    "learner": {
        "groups_per_step": 2,
        "group_size": 2,
        "ranks": 1,
        "backend": "torch",
        "steps": STEPS,
        "lr": 1e-3,
        "advantage": "gigpo",
        "checkpoint_every": 2,
        "keep_checkpoints": 4,
    },
    "buffer": {"capacity": 64, "max_staleness": 1, "keep": "all"},
    "eval": {"tasks": 0},
}


@contextmanager
def fake_actor(run: RunFolder, name: str, tickets: int = sys.maxsize) -> Iterator[None]:
    """Plays every ticket with random tokens, in a thread; puts every seventh trajectory twice. `tickets`: it asks for
    so many and no more, so that what the run holds at its end does not depend on how fast anything was."""
    over = threading.Event()

    def act() -> None:
        rng = np.random.default_rng(7)
        acks = AckLog(run.acks / f"{name}.jsonl")
        with closing(acks), closing(BufferClient(run.address("buffer"), identity=name, deadline_s=20.0)) as client:
            client.hello("actor")
            played = 0
            while not over.is_set():
                if played == tickets:
                    over.wait()  # all steps are done, so that this request gets no ticket; it tells the log's end
                    assert client.tickets(name, (0, 0), 1, [], 0.0, acks.head).tickets == []
                    return
                held = (0, int(client.status()["published"] or 0))
                for ticket in client.tickets(name, held, min(4, tickets - played), [], 0.2, acks.head).tickets:
                    versions = (ticket.min_version[1], held[1])
                    made = random_trajectory(
                        ticket.id.group, ticket.id.index, rng, rows=1 + played % 2, versions=versions
                    )
                    made = replace(made, attempt=ticket.attempt, actor=name, task_id=str(ticket.task["id"]))
                    # Unequal rewards in every group: every step changes the weights.
                    made = with_turns(made, 0.0, float(ticket.id.index % 2), states=(b"a", b"b"))
                    made = acks.announce(made)
                    if client.put(made) != "late":
                        acks.write(made)
                    played += 1
                    if played % 7 == 0:
                        client.put(made)

    thread = threading.Thread(target=act, name=name)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
        assert not thread.is_alive()


def make_run(
    folder: Path, text: TokenText | None = None, sections: dict[str, Any] = SECTIONS, teacher: Path | None = None
) -> RunFolder:
    """Leaves the run folder of a run whose buffer was killed at the end. `text`: keep every group as samples.
    `teacher`: learn from the model in that folder too."""
    model = folder / "model"
    tiny_model().save_pretrained(model)
    if teacher is not None:
        tokenizer_in(model)
        taught = {"path": str(teacher), "reward_weight": 1.0}
        sections = sections | {"learner": sections["learner"] | {"teacher": taught}}
    process = BufferProcess(folder / "run", model={"path": str(model)}, **sections)
    run = process.run
    config = run.load_config()
    process.start()
    compute_alike(config)
    reporter = FakeReporter()
    trainer = Trainer(config, TorchBackend(config, device="cpu"), Objective(config.learner))
    remember(run.teacher, config.learner.teacher.path, trainer.teacher)
    learner = Learner(
        config,
        trainer=trainer,
        buffer=process.client("learner"),
        publisher=ShmPublisher(run.shm),
        reporter=reporter,  # type: ignore[arg-type]
        checkpoints=Checkpoints(run.checkpoints, config.learner.keep_checkpoints),
        save_tokenizer=lambda path: None,
        samples=None if text is None else Samples(run.rollouts, TrackingConfig(rollouts=99), lambda: text),
    )
    try:
        with fake_actor(
            run, "actor-0", tickets=config.learner.steps * config.learner.groups_per_step * config.learner.group_size
        ):
            learner.run(resume=False)
    finally:
        process.close()
    # As the launcher writes what the learner reports.
    events = ({"t": 0.0, "kind": kind, "role": "learner", **fields} for kind, fields in reporter.events)
    (run.path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run
