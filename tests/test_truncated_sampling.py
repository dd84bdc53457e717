"""Truncated sampling from the engine to the gradient: the learner's logprobs are over what the token was drawn from."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.engines.hf.engine import HFEngine
from asyncrl.actors.engines.kept import generate
from asyncrl.actors.engines.protocol import EngineDied, Generation, Sampling
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.buffer.limits import Limits
from asyncrl.buffer.record import from_record, to_record
from asyncrl.buffer.rules import Rules
from asyncrl.config import Config
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.companions import companions
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.tracking.series import check
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.trajectory.kept_ids import kept_ids
from asyncrl.wire import WireError
from tests.learner.tiny import tiny_config, tiny_model

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@lru_cache(maxsize=8)
def sampled(*, turns: int = 2, seed: int = 0, **sampling: Any) -> list[Trajectory]:
    """Episodes of the tiny model by the embedded engine, put and read as the buffer does: two groups of two."""
    engine = HFEngine(tiny_model(seed=seed), slots=4, max_tokens=128)

    async def episode(group: int, index: int) -> Trajectory:
        row = OpenRow(PROMPTS[group])
        for turn in range(turns):
            asked = Sampling(20, 1.0, (), seed=10 * group + index + 100 * turn, **sampling)
            row.sampled(await generate(engine, f"{group}.{index}/{turn}", row.ids, asked))
            row.context([8, 9])
        t = Trajectory(
            TicketId(0, group, index), 0, "train", "actor-0", f"t{group}", "fake", (row.freeze(),), float(index), {},
            turns, "done",
        )  # fmt: skip
        return from_record(to_record(t))

    async def all_of() -> list[Trajectory]:
        await engine.start()
        try:
            return list(await asyncio.gather(*[episode(g, i) for g in range(2) for i in range(2)]))
        finally:
            await engine.close()

    return asyncio.run(all_of())


def apart(batch: Batch) -> torch.Tensor:
    """|learner's logprob - engine's| of the tokens with loss."""
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    (scores,) = backend.logprobs([batch.packed()])
    return (scores.logprobs - batch.behaviour)[batch.mask].abs()


@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 12, "min_p": 0.05}],
    ids=["top_p", "top_k", "min_p", "all"],
)
def test_on_policy_the_ratio_is_1(truncation: dict[str, Any]) -> None:
    batch = flatten(sampled(max_kept=64, **truncation), [0, 1])
    assert int(batch.mask.sum()) == 4 * 40
    differences = apart(batch)
    assert float(differences.exp().sub(1).max()) < 1e-5
    without = apart(dataclasses.replace(batch, kept=None))
    assert float(without.mean()) > 0.05, "which it is not over the whole vocabulary"


def stepped(batch: Batch, trajectories: Sequence[Trajectory], **learner: Any) -> tuple[StepResult, dict[str, float]]:
    config = tiny_config(groups_per_step=2, group_size=2, **learner)
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    made = companions(config, backend)
    result = train_step(backend, objective, batch, config.learner, version=0, companions=made)
    metrics = step_metrics(objective, batch, trajectories, result, version=0, success="success")
    check(metrics)
    return result, metrics


@pytest.mark.parametrize("learner", [{}, {"kl_coef": 0.1, "minibatches": 2}, {"kl_coef": 0.1, "kl_in": "reward"}],
                         ids=["plain", "kl-loss", "kl-reward"])  # fmt: skip
def test_a_training_step_on_policy(learner: dict[str, Any]) -> None:
    """Proximal, current and reference logprobs are over the same ids: nothing differs before the first update."""
    trajectories = sampled(top_p=0.8, max_kept=64)
    result, metrics = stepped(flatten(trajectories, [0, 1]), trajectories, **learner)
    assert result.outcome == "applied"
    assert metrics["correction/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["correction/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["correction/engine_mismatch_max"] < 1e-5
    assert metrics["correction/kept_ids"] > 1
    assert metrics["correction/beyond_max_kept"] == 0


def test_the_reference_is_over_the_same_ids(tmp_path: Path) -> None:
    """So an unchanged policy has no KL, and the estimate is that of two policies that could sample the same."""
    tiny_model().save_pretrained(tmp_path)
    config = tiny_config(kl_coef=0.1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    batch = flatten(sampled(top_p=0.8, max_kept=64), [0, 1])
    (scores,) = TorchBackend(config, tiny_model(), device="cpu").logprobs([batch.packed()], reference=True)
    assert float((scores.logprobs - batch.behaviour)[batch.mask].abs().max()) < 1e-5


def test_a_token_of_more_ids_than_are_recorded_carries_no_loss_and_is_counted() -> None:
    all_kept = sampled(top_p=0.8, max_kept=64)
    sizes = torch.tensor([n for t in all_kept for n in t.rows[0].kept.counts.tolist()])  # type: ignore[union-attr]
    most = int(sizes.median())
    trajectories = sampled(top_p=0.8, max_kept=most)
    batch = flatten(trajectories, [0, 1])
    beyond = torch.zeros_like(batch.mask).masked_scatter_(batch.sampled, sizes > most)
    assert 0 < int(beyond.sum()) < int(batch.sampled.sum())
    assert torch.equal(batch.mask, batch.sampled & ~beyond)
    result, metrics = stepped(batch, trajectories)
    assert metrics["correction/beyond_max_kept"] == int(beyond.sum())
    assert result.outcome == "applied"
    backend = TorchBackend(tiny_config(), tiny_model(), device="cpu")
    scores = backend.logprobs([batch.packed()])[0].logprobs
    assert float((scores - batch.behaviour)[batch.mask].abs().max()) < 1e-5


def test_without_truncation_a_step_is_as_before_by_no_bit() -> None:
    """Whether the code of kept ids is there: a batch without them, and one whose sets are empty."""
    trajectories = sampled()
    assert all(row.kept is None for t in trajectories for row in t.rows)
    batch = flatten(trajectories, [0, 1])
    assert batch.kept is None
    assert batch.packed().kept is None
    _, metrics = stepped(batch, trajectories)
    assert not {"correction/kept_ids", "correction/beyond_max_kept"} & metrics.keys()


def test_rows_taken_from_a_batch_bring_their_ids() -> None:
    batch = flatten(sampled(top_p=0.8, max_kept=64), [0, 1])
    rows = torch.tensor([2, 0])
    taken = batch.take(rows)
    whole, part = batch.packed().kept, taken.packed().kept
    assert whole is not None
    assert part is not None
    per_row = [whole[40 * i : 40 * (i + 1)] for i in (2, 0)]
    for expected, got in zip(torch.cat(per_row).tolist(), part.tolist(), strict=True):
        assert [i for i in expected if i >= 0] == [i for i in got if i >= 0]
    assert float(apart(taken).max()) < 1e-5


def test_rows_with_and_without_kept_ids_train_together() -> None:
    """As after a resume with another top_p."""
    truncated, plain = sampled(top_p=0.8, max_kept=64)[:2], sampled()[2:]
    batch = flatten([*truncated, *plain], [0, 1])
    assert int(batch.mask.sum()) == 4 * 40
    assert float(apart(batch).max()) < 1e-5


class _Engine:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        return self.generation


@pytest.mark.parametrize(
    ("sets", "says"),
    [(None, "gave no kept ids"), ([[7], [9]], "no id of the sampled token itself"), ([[7]], "1 counts")],
)
def test_an_engine_that_gives_none_or_impossible_ones_is_named(sets: Any, says: str) -> None:
    kept = None if sets is None else kept_ids(sets, 8)
    made = Generation(np.array([7, 8], np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", kept=kept)
    engine: Any = _Engine(made)
    with pytest.raises(EngineDied, match=says):
        asyncio.run(generate(engine, "r", [1], Sampling(2, 1.0, (), 0, top_p=0.5, max_kept=8)))
    asyncio.run(generate(engine, "r", [1], Sampling(2, 1.0, (), 0)))


def test_what_is_not_trained_on_records_none() -> None:
    limits = EpisodeLimits.of(Config.model_validate({"actors": {"top_p": 0.9, "max_kept": 100}}))
    ticket = Ticket(TicketId(0, 0, 0), 0, "train", {"id": "t"}, (0, 0), 1, 1.0, 0, 30.0)
    assert limits.sampling(ticket, 0, ()).max_kept == 100
    for other in (dataclasses.replace(ticket, kind="eval"), dataclasses.replace(ticket, temperature=0.0)):
        assert limits.sampling(other, 0, ()).max_kept == 0
        assert limits.sampling(other, 0, ()).top_p == 0.9
    plain = EpisodeLimits.of(Config())
    assert plain.sampling(ticket, 0, ()).max_kept == 0


def test_the_buffer_refuses_more_kept_ids_than_the_run_records() -> None:
    rules = Rules.of(Config.model_validate({"actors": {"top_p": 0.9, "max_kept": 4}}))
    limits = Limits.of(rules, (0, 0), 0)
    few, many = sampled(top_k=4, max_kept=64)[0], sampled(top_k=5, max_kept=64)[0]
    limits.check_rows(few.rows, "ticket 0.0.0")
    with pytest.raises(WireError, match=r"5 kept ids, expected at most 4.*actors\.max_kept"):
        limits.check_rows(many.rows, "ticket 0.0.0")
