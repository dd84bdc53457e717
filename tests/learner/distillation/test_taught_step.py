"""Training steps with a teacher, through the real backend, against whole logits and plain loops."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch
from asyncrl.learner.demonstrations import flat
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import masked_mean
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.companions import companions
from asyncrl.learner.step.teacher import places
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.learner.trainer import Trainer
from asyncrl.rendering.demonstrations import ShownRow
from asyncrl.tracking.series import check
from tests.learner.distillation.teachers import a_trainer, taught_config, teacher_in
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.step.test_critic import episodes
from tests.learner.step.test_train_step import a_batch
from tests.learner.tiny import VOCABULARY, tiny_config, tiny_model

LR = 1e-2


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_in(tmp_path_factory.mktemp("teacher"))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in trainer.backend.weights()}


def trained(config: Config, steps: int = 2) -> tuple[dict[str, Tensor], list[StepResult]]:
    trainer = a_trainer(config)
    return weights(trainer), [trainer.train(a_batch(v), v) for v in range(steps)]


def after(config: Config, steps: int = 2) -> dict[str, Tensor]:
    trainer = a_trainer(config)
    for v in range(steps):
        trainer.train(a_batch(v), v)
    return weights(trainer)


def log_softmaxes(model: Any, batch: Batch, temperature: float) -> Tensor:
    """[T, 40]: the distribution that each token was drawn from, row by row, over the words that both heads have."""
    rows, at = [], 0
    for n in batch.lengths.tolist():
        logits = model(batch.token_ids[at : at + n][None], use_cache=False).logits[0, :, :VOCABULARY] / temperature
        rows.append(torch.cat([torch.zeros(1, VOCABULARY), logits[:-1].log_softmax(-1)]))
        at += n
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_update_follows_the_gradient_of_the_whole_divergence(teacher: Path, kind: str, aggregation: str) -> None:
    config = taught_config(teacher, {"max_grad_norm": 1e9, "aggregation": aggregation}, divergence=kind, coef=0.7)
    # Without any reward: a row without advantage has a gradient all the same.
    trainer, batch = a_trainer(config), dataclasses.replace(a_batch(), rewards=torch.zeros_like(a_batch().rewards))
    seen: dict[str, Tensor] = {}
    model = trainer.backend._model
    trainer.backend.apply = lambda lr: seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
    result = trainer.train(batch, 0)

    slow = tiny_model()
    log_p = log_softmaxes(slow, batch, 1.0)
    with torch.no_grad():
        log_q = log_softmaxes(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), batch, 1.0)
    above, below = (log_p, log_q) if kind == "reverse_kl" else (log_q, log_p)
    per_token = (above.exp() * (above - below)).sum(1)
    if aggregation == "token_mean":
        expected = 0.7 * per_token[batch.mask].mean()
    else:
        shares = []
        for episode in batch.episodes.unique():
            of_episode = (batch.episodes == episode).repeat_interleave(batch.lengths)
            shares.append(per_token[of_episode & batch.mask].mean())
        expected = 0.7 * torch.stack(shares).mean()
    expected.backward()
    assert result.record.loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert result.record.teacher_loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(seen[name], parameter.grad, atol=2e-6, rtol=2e-4)


def test_the_sampled_token_is_weighed_and_bounded(teacher: Path) -> None:
    """Of a token: -w A theta, w = min(e^(theta - mu), cap) and A = log(q / theta), both constant."""
    config = taught_config(teacher, over="token", ratio_cap=1.05, limit=0.5)
    trainer, batch = a_trainer(config), a_batch()
    slopes: list[Tensor] = []
    objective, evaluate = trainer.objective, trainer.objective.teacher.per_token

    def kept(rows: Batch, current: Tensor, seen: Tensor) -> Tensor:
        leaf = current.detach().requires_grad_()
        (slope,) = torch.autograd.grad(evaluate(rows, leaf, seen).sum(), leaf)
        slopes.append(slope)
        return evaluate(rows, current, seen)

    objective.teacher.per_token = kept
    (record,) = [trainer.train(batch, 0).record]
    assert record.teacher is not None
    log_r = (record.teacher[1] - record.current).tolist()
    expected = [
        -min(math.exp(c - b), 1.05) * max(-0.5, min(0.5, r)) if m else 0.0
        for r, c, b, m in zip(
            log_r, record.current.tolist(), batch.behaviour.tolist(), batch.mask.tolist(), strict=True
        )
    ]
    assert sorted(torch.cat(slopes).tolist()) == pytest.approx(sorted(expected), abs=1e-6)
    assert any(abs(x) > 0.5 for x in expected), "the cap of the weight acts"


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_an_advantage_is_added_to_that_of_the_reward(teacher: Path, kind: str) -> None:
    plain = a_trainer(tiny_config()).train(a_batch(), 0).record.advantages
    given = {
        "over": "token",
        "into": "advantage",
        "coef": 0.3,
        "reward_weight": 2.0,
        "divergence": kind,
        "jsd_beta": 0.4,
    }
    record = a_trainer(taught_config(teacher, **given)).train(a_batch(), 0).record
    assert record.teacher is not None
    log_r = record.teacher[1] - record.proximal
    mixture = (0.6 + 0.4 * log_r.exp()).log() * 0.6
    of_teacher = {"reverse_kl": log_r, "forward_kl": log_r.exp() - 1, "jsd": mixture}[kind]
    expected = 2.0 * plain + 0.3 * torch.where(a_batch().sampled, of_teacher.clamp(-10, 10), 0.0)
    torch.testing.assert_close(record.advantages, expected, atol=1e-5, rtol=1e-5)


def test_a_teacher_that_is_only_watched_changes_nothing_by_a_bit(teacher: Path) -> None:
    plain = after(tiny_config())
    watched = after(taught_config(teacher, coef=0.0, reward_weight=1.0))
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    learned = after(taught_config(teacher))
    assert not all(torch.equal(plain[name], learned[name]) for name in plain)


CUTS = [{}, {"over": "top_k", "k": 4}, {"over": "token"}, {"over": "token", "into": "advantage"}]


@pytest.mark.parametrize("given", CUTS, ids=lambda x: "-".join(map(str, x.values())) or "vocabulary")
def test_how_the_step_is_cut_does_not_matter(teacher: Path, given: dict[str, Any]) -> None:
    runs = [
        after(taught_config(teacher, {"lr": LR, "tokens_per_micro_batch": limit}, reward_weight=0.5, **given))
        for limit in (60, 100_000)
    ]
    for name in runs[0]:
        torch.testing.assert_close(*(run[name] for run in runs), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("given", CUTS[:3], ids=lambda x: "-".join(map(str, x.values())) or "vocabulary")
def test_an_objective_over_the_whole_batch_gets_the_same_term(teacher: Path, given: dict[str, Any]) -> None:
    """m2po looks at all tokens, so the passes only carry its gradient; the teacher's term must not notice."""
    learner = {"lr": LR, "corrections": ({"name": "m2po"},), "advantage": "reinforce_pp"}
    runs = [
        trained_results(taught_config(teacher, learner | {"tokens_per_micro_batch": limit}, reward_weight=0.5, **given))
        for limit in (60, 100_000)
    ]
    assert runs[0][1].loss == pytest.approx(runs[1][1].loss, rel=1e-5)
    assert runs[0][1].teacher_loss == pytest.approx(runs[1][1].teacher_loss, rel=1e-5)
    for name in runs[0][0]:
        torch.testing.assert_close(*(run[0][name] for run in runs), atol=1e-4, rtol=1e-3)


def trained_results(config: Config) -> tuple[dict[str, Tensor], Any]:
    trainer = a_trainer(config)
    record = trainer.train(a_batch(), 0).record
    return weights(trainer), record


@pytest.mark.parametrize("given", [{}, {"over": "token", "into": "advantage"}], ids=["loss", "advantage"])
def test_two_ranks_equal_one(teacher: Path, given: dict[str, Any]) -> None:
    one, two = on_kept_ranks(1, shard, str(teacher), given)[0], on_kept_ranks(2, shard, str(teacher), given)[0]
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-3)


def shard(teacher: str, given: dict[str, Any]) -> dict[str, Tensor]:
    beside = {"per_step": 2, "weight": 0.5}
    config = taught_config(teacher, {"lr": LR, "tokens_per_micro_batch": 60, "demonstrations": beside}, **given)
    backend = Fsdp2Backend(config, tiny_model(), device="cpu")
    found: dict[str, Tensor] = {}
    for v in range(2):
        # One part costs more and one less than all of the groups: in common rounds, ranks would want different things.
        batch = dataclasses.replace(a_batch(v), demonstrations=long_demonstrations((116, 5)))
        record = train_step(backend, Objective(config.learner), batch, config.learner, version=v).record
        assert record.teacher is not None
        found[f"seen {v}"] = record.teacher
    return found | dict(backend.weights())


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_trained_on(teacher: Path) -> None:
    for given in CUTS:
        trainer = a_trainer(taught_config(teacher, {"minibatches": 2}, **given))
        with torch.no_grad():
            trainer.backend._teacher._scorer.model.lm_head.weight[3] = math.inf
        before = weights(trainer)
        result = trainer.train(a_batch(), 0)
        assert result.outcome == "guard"
        assert "the teacher's logprobs are not finite at" in result.why
        assert "learner.teacher.path" in result.why
        assert all(torch.equal(before[name], x) for name, x in weights(trainer).items())


def test_a_row_that_the_teacher_cannot_read_is_refused(tmp_path: Path) -> None:
    config = taught_config(teacher_in(tmp_path, max_position_embeddings=256))
    trainer = a_trainer(config)
    trainer.backend._teacher._positions = 10
    with pytest.raises(RunError, match=r"a row has \d+ tokens and the teacher reads 10: lower env.max_tokens"):
        trainer.train(a_batch(), 0)


def test_a_separate_critic_holds_no_teacher(teacher: Path) -> None:
    config = taught_config(teacher, {"advantage": "gae", "critic": "separate"}, reward_weight=1.0)
    built: list[TorchBackend] = []

    def another(of_critic: Config) -> TorchBackend:
        built.append(TorchBackend(of_critic, tiny_model(), device="cpu"))
        return built[-1]

    policy = another(config)
    companions(config, policy, another)
    assert policy.teacher_digest
    assert [each.teacher_digest for each in built[1:]] == [""]


@pytest.mark.parametrize("limit", [60, 100_000], ids=["by parts", "one pass"])
def test_neither_teacher_nor_critic_reads_demonstrations(teacher: Path, limit: int) -> None:
    given = {"advantage": "gae", "critic": "shared", "demonstrations": {"per_step": 6, "weight": 0.5}}
    config = taught_config(teacher, given | {"tokens_per_micro_batch": limit}, reward_weight=1.0)
    trainer = a_trainer(config)
    groups = a_batch()
    batch, read = dataclasses.replace(groups, demonstrations=long_demonstrations()), []
    trainer.backend._teacher._positions = int(groups.lengths.max())
    accumulate = trainer.backend.accumulate
    trainer.backend.accumulate = lambda parts, loss: (read.extend(parts), accumulate(parts, loss))
    result = trainer.train(batch, 0)
    assert result.outcome == "applied"
    longest = [part for part in read if max(part.lengths) > groups.lengths.max()]
    assert longest
    assert all(part.wants == {"logprobs", "entropy"} for part in longest)
    of_groups = [part for part in read if part.wants == {"logprobs", "entropy", "teacher", "hidden"}]
    assert sum(len(part.token_ids) for part in of_groups) == len(groups.token_ids)
    assert result.record.shown_tokens == int(long_demonstrations().mask.sum())


def long_demonstrations(lengths: tuple[int, ...] = (116, 116)) -> Batch:
    """By default each longer than every row of the groups."""
    ids = list(range(1, 30)) * 4
    return flat([(n, ShownRow(ids[:of], [False] + [True] * (of - 1))) for n, of in enumerate(lengths)])


def test_places_of_tokens_in_turns() -> None:
    sampled = [[0, 1, 1, 0, 1], [0, 0, 1], [0, 1, 0, 1, 1, 1]]
    flat = torch.tensor([bool(x) for row in sampled for x in row])
    batch = dataclasses.replace(
        a_batch(), mask=flat, versions=torch.where(flat, 0, -1), lengths=torch.tensor([len(row) for row in sampled])
    )
    turn, position = places(batch)
    assert turn[flat].tolist() == [1, 1, 2, 1, 1, 2, 2, 2]
    assert position[flat].tolist() == [1, 2, 1, 1, 1, 1, 2, 3]


def test_what_is_reported(teacher: Path) -> None:
    trainer, batch = a_trainer(taught_config(teacher)), a_batch()
    result = trainer.train(batch, 0)
    metrics = step_metrics(trainer.objective, batch, episodes(), result, version=0, success="reward")
    check(metrics)
    assert result.record.teacher is not None
    assert (
        metrics["teacher/divergence"]
        == metrics["teacher/reverse_kl"]
        == pytest.approx(metrics["teacher/loss"], rel=1e-5)
    )
    agreeing = result.record.teacher[3][batch.mask].tolist()
    assert metrics["teacher/agreement"] == pytest.approx(sum(agreeing) / len(agreeing))
    turn, position = places(batch)
    for family, place, low, high in (("turn", turn, 4, 7), ("position", position, 2, 3)):
        inside = (place >= low) & (place <= high) & batch.mask
        expected = float(masked_mean(result.record.teacher[4], inside))
        assert metrics[f"teacher/reverse_kl_by_{family}/{low}_{high}"] == pytest.approx(expected)
    plain = a_trainer(tiny_config())
    of_plain = step_metrics(plain.objective, batch, episodes(), plain.train(batch, 0), version=0, success="reward")
    assert not any(name.startswith("teacher/") for name in of_plain)
    lower = a_trainer(taught_config(teacher, over="top_k", k=3))
    of_lower = step_metrics(lower.objective, batch, episodes(), lower.train(batch, 0), version=0, success="reward")
    assert of_lower["teacher/lower_bound"] < of_lower["teacher/reverse_kl"]
    assert "teacher/divergence" not in of_lower
