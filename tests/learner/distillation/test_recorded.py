"""What a server recorded of a teacher trains as the teacher in this process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.learner.backends.comparison import ROWS, TeacherStates, compared
from asyncrl.learner.backends.protocol import TeacherWords
from asyncrl.learner.backends.recorded import compared_with_recorded
from asyncrl.learner.batch import Batch
from asyncrl.learner.batch.taught import Taught, of_groups
from asyncrl.learner.distillation.divergence import Comparison, Divergence, Kind
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.tracking.series import check
from asyncrl.wire.teacher_scores import GroupScores, TrajectoryScores
from tests.learner.distillation.teachers import a_trainer, taught_config, teacher_in
from tests.learner.step.test_critic import episodes
from tests.learner.step.test_train_step import a_batch

N, H, V, K = 13, 6, 31, 4


def states() -> tuple[Tensor, Tensor, Tensor, TeacherStates]:
    torch.manual_seed(3)
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    teacher = TeacherStates(torch.randn(N, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64))
    return hidden, weight, torch.randint(0, V, (N,)), teacher


def recorded(teacher: TeacherStates, targets: Tensor, k: int = K) -> TeacherWords:
    log_q = (teacher.hidden @ teacher.weight.t()).log_softmax(1)
    top = log_q.topk(k, 1)
    return TeacherWords(top.indices.int(), top.values, log_q.gather(1, targets[:, None])[:, 0])


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_value_and_gradient_are_those_of_the_teacher_in_this_process(kind: Kind, chunk: int | None) -> None:
    hidden, weight, targets, teacher = states()
    how = Comparison(Divergence(kind, 0.3), K)
    slope = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)
    local = compared(hidden, weight, targets, teacher, how, chunk=chunk)
    expected = torch.autograd.grad((local[0] * slope).sum(), (hidden, weight))
    of_server = compared_with_recorded(hidden, weight, recorded(teacher, targets), how.divergence, chunk=chunk)
    found = torch.autograd.grad((of_server[0] * slope).sum(), (hidden, weight))
    for name in ("divergence", "logprobs", "agrees"):
        assert torch.allclose(of_server[ROWS.index(name)], local[ROWS.index(name)], rtol=0, atol=1e-9), name
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


def test_fewer_words_give_a_lower_bound() -> None:
    hidden, weight, targets, teacher = states()
    for row in ("reverse_kl", "forward_kl"):
        whole = compared(hidden, weight, targets, teacher, Comparison())[ROWS.index(row)]
        bounds = [
            compared_with_recorded(hidden, weight, recorded(teacher, targets, k), Divergence())[ROWS.index(row)]
            for k in (1, 5, 12, 20)
        ]
        for less, more in zip(bounds, [*bounds[1:], whole], strict=True):
            assert (less <= more + 1e-9).all()
        assert float((whole - bounds[-1]).mean()) < 0.2 * float((whole - bounds[0]).mean())


def test_what_rounding_leaves_of_the_rest_is_not_taken_for_nothing() -> None:
    hidden, weight, targets, teacher = states()
    sure = replace(recorded(teacher, targets), logprobs=torch.full((N, K), -1.3862, dtype=torch.float64))
    found = compared_with_recorded(hidden, weight, sure, Divergence())[0]
    assert float(found.detach().max()) < 20.0, "the words add up to 1.0001: the rest is at least what rounding hides"


def test_a_word_that_the_policy_lacks_belongs_to_the_rest() -> None:
    hidden, weight, targets, teacher = states()
    words = recorded(teacher, targets, K)
    beyond = replace(words, ids=torch.cat([words.ids[:, :-1], torch.full((N, 1), V + 5, dtype=torch.int32)], 1))
    fewer = TeacherWords(words.ids[:, :-1], words.logprobs[:, :-1], words.sampled)
    found, expected = (
        compared_with_recorded(hidden, weight, each, Divergence("forward_kl")) for each in (beyond, fewer)
    )
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-12)
    mine, theirs = (torch.autograd.grad(each[0].sum(), weight, retain_graph=True)[0] for each in (found, expected))
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def as_recorded(folder: Path, batch: Batch, k: int) -> Batch:
    """The batch with what a server of the teacher in the folder would say of it."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(folder).float()
    ids, logprobs, sampled = [], [], []
    for row in torch.split(batch.token_ids, batch.lengths.tolist()):
        with torch.no_grad():
            # The policy knows 40 words, the teacher 256; the local comparison is over those that both have.
            log_q = teacher(row[None]).logits[0, :-1, :40].log_softmax(-1)
        log_q = torch.cat([torch.zeros(1, log_q.shape[1]), log_q])
        top = log_q.topk(k, 1) if k else log_q[:, :0].topk(0, 1)
        ids.append(top.indices.int())
        logprobs.append(top.values)
        sampled.append(log_q.gather(1, row[:, None])[:, 0])
    return replace(batch, taught=Taught(torch.cat(ids), torch.cat(logprobs), torch.cat(sampled)))


@pytest.mark.parametrize(
    ("given", "k"),
    [
        ({"over": "top_k", "k": 5, "divergence": "jsd"}, 5),
        ({"over": "token"}, 0),
        ({"over": "token", "into": "advantage"}, 0),
    ],
    ids=["top_k", "token", "advantage"],
)
def test_a_step_gives_the_weights_that_the_teacher_in_this_process_gives(
    tmp_path: Path, given: dict[str, Any], k: int
) -> None:
    folder = teacher_in(tmp_path / "teacher")
    local = a_trainer(taught_config(folder, None, **given))
    servers = {"scored_by": "servers", "servers": ["http://fake:1"]}
    of_server = a_trainer(taught_config(folder, None, **given, **servers))
    assert (of_server.teacher, bool(local.teacher)) == ("", True), "no model of the teacher is loaded"
    for version in range(2):
        batch = a_batch(version)
        result = local.train(batch, version)
        with_scores = as_recorded(folder, batch, k)
        other = of_server.train(with_scores, version)
        assert (result.outcome, other.outcome) == ("applied", "applied")
    mine, theirs = (dict(trainer.backend.weights()) for trainer in (of_server, local))
    worst = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
    assert worst < 2e-5, worst


def test_what_is_reported_is_named_a_bound(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path / "teacher")
    config = taught_config(folder, None, over="top_k", k=5, scored_by="servers", servers=["http://fake:1"])
    trainer = a_trainer(config)
    batch = as_recorded(folder, a_batch(0), 5)
    result = trainer.train(batch, 0)
    values = step_metrics(trainer.objective, batch, episodes(), result, version=0, success="reward")
    of_teacher = {name for name in values if name.startswith("teacher/")}
    assert of_teacher == {"teacher/loss", "teacher/log_ratio", "teacher/lower_bound", "teacher/agreement"}
    check(values)


def test_scores_of_other_tokens_and_of_fewer_words_are_refused() -> None:
    from asyncrl.trajectory import TicketId
    from tests.buffer.fakes import trajectory

    t = trajectory(TicketId(0, 0, 0), (0, 0, 0))

    def scores(n: int, k: int) -> GroupScores:
        of_it = TrajectoryScores(np.zeros((n, k), np.int32), np.zeros((n, k), np.float32), np.zeros(n, np.float32))
        return GroupScores(0, 0, 0, "scorer-0", "t", (t.digest(),), (of_it,))

    assert of_groups([t], [], 3) is None
    found = of_groups([t], [scores(3, 4)], 2)
    assert found is not None
    assert found.ids.shape == (5, 2)
    for bad in (scores(2, 4), scores(3, 1)):
        with pytest.raises(ValueError, match=r"expected 3 with 2: a higher learner\.teacher\.k"):
            of_groups([t], [bad], 2)
    with pytest.raises(ValueError, match="has no scores"):
        of_groups([trajectory(TicketId(0, 1, 0))], [scores(3, 2)], 2)
