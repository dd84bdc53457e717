"""A run folder with a ledger, payloads and samples of the real buffer and store; the episodes are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.core import Buffer
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder
from asyncrl.tracking.rollouts.sample import FORMAT, Rollout, RolloutRow
from asyncrl.tracking.rollouts.store import Store
from asyncrl.tracking.rollouts.text import TokenText
from asyncrl.trajectory import CONTEXT, Row, Span, Ticket, Trajectory, TurnRecord, TurnReward
from tests.buffer.fakes import learner, open_buffer, put

PROMPT = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "2+2"}}</tool_call><|im_end|>'
RESULT = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
Words = Callable[[Ticket], str]


def characters(ids: Sequence[int]) -> str:
    """A tokenizer whose ids are code points."""
    return "".join(map(chr, ids))


TEXT = TokenText(characters)


def answer(ticket: Ticket) -> str:
    return f"The answer of {ticket.id.group}.{ticket.id.index} is {4 + ticket.id.index}.<|im_end|>"


def episode(ticket: Ticket, words: Words = answer, version: int = 0) -> Trajectory:
    """Two turns: a call of a tool, its result, an answer."""
    parts = [(PROMPT, False), (CALL, True), (RESULT, False), (words(ticket), True)]
    ids = np.array([ord(c) for text, _ in parts for c in text], np.int32)
    mask = np.array([sampled for text, sampled in parts for _ in text])
    rng = np.random.default_rng([ticket.id.group, ticket.id.index])
    logprobs = np.where(mask, -rng.exponential(0.7, len(ids)), 0).astype(np.float32)
    versions = np.where(mask, version, CONTEXT).astype(np.int32)
    versions[-3:][mask[-3:]] += 1  # the weights changed before the end
    reward = float(ticket.id.index % 2) if ticket.id.group % 3 else 0.0
    return Trajectory(
        id=ticket.id,
        attempt=ticket.attempt,
        kind="train",
        actor="actor-0",
        task_id=str(ticket.task["id"]),
        env="calculator" if ticket.id.group % 2 else "search",
        rows=(Row(ids, mask, logprobs, versions),),
        reward=reward,
        rewards={"success": reward, "format": 0.25},
        turns=2,
        stop_reason="done" if ticket.id.index else "max_tokens",
        metrics={"calls": 1.0},
        turn_records=(
            TurnRecord(0.01, 0.5, 0.1 * (1 + ticket.id.index), 40, 30),
            TurnRecord(None, 0.4, None, 20, 25),
        ),
        turn_rewards=(
            TurnReward(0.0, (Span(0, len(PROMPT), len(CALL)),), b"asked", {"format": 0.25}),
            TurnReward(reward, (Span(0, len(PROMPT + CALL + RESULT), len(words(ticket))),), bytes([200, 1])),
        ),
    )


def sample(t: Trajectory, b: int, version: int, branch: int = 0) -> Rollout:
    """As the learner would write it, with made-up numbers that differ from token to token."""
    rows = []
    for row in t.rows:
        words, ends = TEXT.split(row.token_ids.tolist())
        scale = np.arange(len(row)) % 7
        rows.append(
            RolloutRow(
                text=words,
                ends=ends,
                token_ids=row.token_ids.tolist(),
                sampled=row.mask.tolist(),
                versions=row.versions.tolist(),
                logprobs=row.logprobs.tolist(),
                learner_logprobs=np.where(row.mask, row.logprobs + 0.1 * (scale - 3), 0).astype(np.float32).tolist(),
                weights=np.where(row.mask, 1 + 0.1 * (scale - 3), 0).astype(np.float32).tolist(),
                advantages=np.where(row.mask, t.reward - 0.5, 0).astype(np.float32).tolist(),
                loss_mask=(row.mask & (scale != 6)).tolist(),
            )
        )
    return Rollout(
        format=FORMAT, branch=branch, batch=b, version=version, outcome="applied", group=t.id.group, index=t.id.index,
        attempt=t.attempt, actor=t.actor, task_id=t.task_id, env=t.env, reward=t.reward, rewards=dict(t.rewards),
        turns=t.turns, stop_reason=t.stop_reason, group_weight=1.0, digest=t.digest(), rows=rows,
        metrics=dict(t.metrics), turn_records=list(t.turn_records),
        turn_rewards=list(t.turn_rewards),
    )  # fmt: skip


class MadeRun:
    """A run of one actor and one learner. `close` leaves it as one that is over."""

    def __init__(self, path: Path, *, samples: int = 1, words: Words = answer, **rules: Any) -> None:
        config = Config.model_validate({"model": {"path": str(path / "model")}, "buffer": {"keep": "all"}})
        self.run = RunFolder.create(path, config)
        self.words, self.sampled = words, samples
        self.rules = {"group_size": 4, "groups_per_step": 2, "capacity": 4096} | rules
        self.buffer: Buffer = open_buffer(self.run.buffer, keep_all=True, **self.rules)
        self.incarnation = learner(self.buffer)
        self.store = Store(self.run.rollouts, 64.0)
        self.steps = 0
        self.put: dict[tuple[int, int], Trajectory] = {}

    def step(self, fail: int = 0) -> None:
        """One training step; the first `fail` tickets fail once before."""
        tickets = self.issue()
        for ticket in tickets[:fail]:
            self.buffer.fail("actor-0", ticket.id, ticket.attempt, "env_error", "the tool server answered 503")
        for ticket in tickets[fail:]:
            self.play(ticket)
        for ticket in self.issue() if fail else ():
            self.play(ticket)
        self.train()

    def issue(self, credits: int = 4096) -> list[Ticket]:
        history = self.buffer.ledger.history
        return self.buffer.issue(0.0, "actor-0", (history.branch, history.published or 0), credits)[0]

    def play(self, ticket: Ticket) -> None:
        made = episode(ticket, self.words, ticket.min_version[1])
        row = made.rows[0]
        newest = self.buffer.ledger.history.published or 0
        made = replace(made, rows=(replace(row, versions=np.minimum(row.versions, newest)),))
        assert put(self.buffer, made) == "stored"
        self.put[made.id.group, made.id.index] = made

    def train(self) -> None:
        given = self.buffer.batch(0.0, self.incarnation, self.steps)
        assert given.batch is not None, given.why
        version = self.buffer.finished(self.incarnation, self.steps, "applied")
        self.buffer.published(self.incarnation, self.buffer.ledger.history.branch, version, f"digest-{version}")
        chosen = [t for key, t in sorted(self.put.items()) if key[0] in given.batch.groups[: self.sampled]]
        self.store.write([sample(t, self.steps, given.batch.version) for t in chosen])
        self.steps += 1

    def close(self) -> RunFolder:
        self.buffer.commit(0.0)
        self.buffer.database.close()
        return self.run
