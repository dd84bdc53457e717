"""What the loss's ratio is against, which losses may go uncorrected, and how large a step a stale batch gets."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.batch import Batch
from asyncrl.learner.build import refuse_uncorrected
from asyncrl.learner.losses import LOSSES, LossInputs, PolicyLoss, loss
from asyncrl.learner.objective.functions import Functions
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.reporting.told import told
from asyncrl.learner.step.diagnostics import effective_sample_size, mismatch, sequence_effective_sample_size
from asyncrl.learner.step.proximal import approximate_proximal
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.tracking.series import check
from tests.learner.flat_batches import loss_inputs
from tests.learner.reporting.test_told import fake_session
from tests.learner.step.test_train_step import _Counting, a_batch, differ, episodes
from tests.learner.tiny import tiny_config, tiny_model

PLAIN_PPO = {"loss": "ppo", "proximal": "behaviour", "corrections": (), "unsafe": True}


def one_step(config: Config, batch: Batch | None = None) -> tuple[dict[str, Tensor], StepResult, int]:
    """Weights after it, the result, and the calls that scored without gradient."""
    backend = _Counting(config, tiny_model(), device="cpu")
    backend.extra = 0
    result = train_step(backend, Objective(config.learner), batch or a_batch(), config.learner, version=3)
    return {n: t.clone() for n, t in backend.weights()}, result, backend.extra


def test_approximated_proximal_logprobs_cost_no_forward() -> None:
    batch = a_batch()
    exact, _, scored = one_step(tiny_config(minibatches=2))
    got, result, extra = one_step(tiny_config(minibatches=2, proximal="approximate"))
    assert (scored, extra) == (1, 0)
    record = result.record
    expected = approximate_proximal(batch.behaviour, record.current, batch.versions, 3)
    assert torch.equal(record.anchor[batch.mask], expected[batch.mask])
    assert torch.equal(record.proximal, record.current), "what is reported is no mixture with who sampled"
    assert 0 < differ(got, exact) < 1e-2


def test_with_one_update_nothing_is_approximated() -> None:
    exact, _, _ = one_step(tiny_config())
    got, _, extra = one_step(tiny_config(proximal="approximate"))
    assert extra == 0
    assert differ(got, exact) == 0.0


@pytest.mark.parametrize("minibatches", [1, 2])
def test_plain_ppo_is_anchored_to_who_sampled(minibatches: int) -> None:
    config, batch = tiny_config(**PLAIN_PPO, minibatches=minibatches), a_batch()
    _, result, extra = one_step(config, batch)
    record = result.record
    assert extra == 0
    assert torch.equal(record.anchor[batch.mask], batch.behaviour[batch.mask])
    assert torch.equal(record.weights[batch.mask], torch.ones(int(batch.mask.sum())))
    if minibatches == 1:
        plain = LOSSES["ppo"](
            loss_inputs(record.current, batch.behaviour, record.advantages, batch.mask, batch.lengths)
        )
        torch.testing.assert_close(record.loss, float(plain.per_token.sum() / batch.mask.sum()))
    # The diagnostics still compare the learner with who sampled.
    values = step_metrics(Objective(config.learner), batch, episodes(), result, version=3, success="success")
    check(values)
    expected = mismatch(record.current, batch.behaviour, batch.mask)["mismatch_kl"]
    assert values["correction/mismatch_kl"] == pytest.approx(float(expected))
    assert values["correction/mismatch_kl"] > 0.01


def test_an_approximation_hides_no_difference_between_engine_and_learner() -> None:
    """With a rate of 0 the learner is the same in all updates, and so is what is reported of it."""
    batch, reported = a_batch(), []
    for proximal in ("recompute", "approximate"):
        config = tiny_config(minibatches=2, proximal=proximal, lr=0.0)
        _, result, _ = one_step(config, batch)
        values = step_metrics(Objective(config.learner), batch, episodes(), result, version=3, success="success")
        said = told(fake_session("auto"), batch, result)
        assert said is not None
        names = [n for n in values if "mismatch" in n or "sequence_ess" in n or "ratio_m" in n]
        reported.append({name: values[name] for name in names} | {"told": said.ess})
    assert reported[1] == pytest.approx(reported[0], rel=1e-3)
    assert reported[1]["correction/engine_mismatch_mean"] > 0.1
    assert reported[1]["told"] < 0.8


@pytest.mark.parametrize(
    ("proximal", "learner"), [("approximate", {}), ("behaviour", {"corrections": (), "unsafe": True})]
)
def test_what_the_updates_moved_is_counted_from_the_anchor(proximal: str, learner: dict[str, Any]) -> None:
    config, batch = tiny_config(minibatches=2, proximal=proximal, **learner), a_batch()
    _, result, _ = one_step(config, batch)
    values = step_metrics(Objective(config.learner), batch, episodes(), result, version=3, success="success")
    expected = mismatch(result.record.current, result.record.anchor, batch.mask)["mismatch_kl"]
    assert values["correction/approx_kl"] == pytest.approx(float(expected))
    assert values["correction/approx_kl"] > 0.01


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("learner", [{"proximal": "approximate"}, PLAIN_PPO], ids=["approximate", "behaviour"])
def test_how_the_batch_is_cut_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, learner: dict[str, Any], minibatches: int
) -> None:
    few = tiny_config(tokens_per_micro_batch=100_000, minibatches=minibatches, **learner)
    many = tiny_config(tokens_per_micro_batch=130, minibatches=minibatches, **learner)
    expected, _, _ = one_step(few)
    assert differ(one_step(many)[0], expected) < 1e-5
    monkeypatch.setattr(Functions, "row_by_row", lambda _: False)
    assert differ(one_step(many)[0], expected) < 1e-5


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_a_stale_batch_takes_a_smaller_step(rule: str, power: float) -> None:
    batch = a_batch()
    _, full, _ = one_step(tiny_config())
    _, scaled, _ = one_step(tiny_config(ess_lr=rule, ess_lr_base=0.8))
    ess = float(sequence_effective_sample_size(full.record.current, batch.behaviour, batch.mask, batch.lengths))
    assert ess < 0.8
    assert (full.record.lr, full.record.lr_scale) == (1e-3, 1.0)
    assert scaled.record.lr_scale == pytest.approx((ess / 0.8) ** power)
    assert scaled.record.lr == pytest.approx(1e-3 * scaled.record.lr_scale)
    config = tiny_config(ess_lr=rule, ess_lr_base=0.8)
    values = step_metrics(Objective(config.learner), batch, episodes(), scaled, version=3, success="success")
    assert values["weights/lr_scale"] == scaled.record.lr_scale
    assert values["correction/sequence_ess"] == pytest.approx(ess)


def test_a_fresh_batch_takes_the_whole_step() -> None:
    """Behaviour logprobs that are the learner's own: the weights are 1, and so is the scale."""
    config = tiny_config(ess_lr="linear")
    batch = a_batch()
    _, result, _ = one_step(config, batch)
    own = batch.behaviour.clone()
    own[batch.mask] = result.record.current[batch.mask]
    fresh = {n: getattr(batch, n) for n in Batch.__slots__} | {"behaviour": own}
    _, result, _ = one_step(config, Batch(**fresh))
    assert math.isclose(result.record.lr_scale, 1.0, rel_tol=1e-4)
    assert float(effective_sample_size(result.record.weights, batch.mask)) == pytest.approx(1.0, abs=1e-4)


@loss(correction="itself")
def corrects_itself(inputs: LossInputs) -> PolicyLoss:
    return PolicyLoss(-inputs.current * inputs.advantages, {}, torch.zeros_like(inputs.mask))


def declares_nothing(inputs: LossInputs) -> PolicyLoss:
    return PolicyLoss(-inputs.current * inputs.advantages, {}, torch.zeros_like(inputs.mask))


def test_of_the_users_own_loss_the_learner_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_losses", sys.modules[__name__])

    def config(**learner: Any) -> Config:
        return Config.model_validate({"learner": {"corrections": ()} | learner})

    refuse_uncorrected(config(loss="my_losses:corrects_itself"))
    refuse_uncorrected(config(loss="my_losses:declares_nothing", unsafe=True))
    refuse_uncorrected(config(loss="my_losses:declares_nothing", corrections=({"name": "icepop"},)))
    with pytest.raises(ConfigError, match=r"learner.corrections is empty.*max_staleness is 2"):
        refuse_uncorrected(config(loss="my_losses:declares_nothing"))
    with pytest.raises(ConfigError, match=r"learner.proximal is behaviour"):
        refuse_uncorrected(
            config(loss="my_losses:declares_nothing", proximal="behaviour", corrections=({"name": "tis"},))
        )
