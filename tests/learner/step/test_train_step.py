from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses import LOSSES, properties_of
from asyncrl.learner.objective.functions import Functions
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.tracking.series import check
from asyncrl.trajectory import Trajectory
from tests.learner import breaking_loss
from tests.learner.tiny import random_trajectory, tiny_config, tiny_model


def episodes(seed: int = 0, groups: int = 4, size: int = 4) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    made = [
        random_trajectory(g, i, rng, rows=1 + (i == 1), versions=(0, 3)) for g in range(groups) for i in range(size)
    ]
    # No group without a gradient, whatever the seed.
    return [dataclasses.replace(t, reward=float(t.id.index % 2) + 0.1 * t.id.index) for t in made]


def a_batch(seed: int = 0) -> Batch:
    return flatten(episodes(seed), range(4))


def trained(config: Config, steps: int = 2) -> tuple[dict[str, Tensor], list[StepResult]]:
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    results = [train_step(backend, objective, a_batch(v), config.learner, version=v) for v in range(steps)]
    return {n: t.clone() for n, t in backend.weights()}, results


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def plain_two_steps(minibatches: int, factors: dict[int, float] | None = None) -> dict[str, Tensor]:
    """GRPO, decoupled PPO, token TIS, token mean, written as loops over rows and tokens. `factors`: of the loss of
    replayed groups."""
    model = tiny_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def logprobs(row: Any) -> Tensor:
        ids = torch.tensor(row.token_ids.tolist())
        return model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]

    for step in range(2):
        played = episodes(step)
        advantage = {}
        for t in played:
            rewards = torch.tensor([o.reward for o in played if o.id.group == t.id.group])
            advantage[t.id] = float((t.reward - rewards.mean()) / (rewards.std() + 1e-6))
        with torch.no_grad():
            proximal = {(t.id, i): logprobs(row) for t in played for i, row in enumerate(t.rows)}
        for share in range(minibatches):
            per = 4 // minibatches
            chosen = [t for t in played if t.id.group // per == share]
            total, count = torch.zeros(()), sum(t.num_policy_tokens for t in chosen)
            for t in chosen:
                for i, row in enumerate(t.rows):
                    current = logprobs(row)
                    for at in np.flatnonzero(row.mask):
                        before = float(proximal[t.id, i][at - 1])
                        weight = min(np.exp(np.clip(before - float(row.logprobs[at]), -20, 20)), 2.0)
                        ratio = (current[at - 1] - before).exp()
                        a = advantage[t.id]
                        loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
                        if a < 0:
                            loss = loss.clamp(max=-3.0 * a)
                        total = total + (factors or {}).get(t.id.group, 1.0) * weight * loss
            optimizer.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("minibatches", [1, 2])
def test_two_steps_equal_a_plain_loop(minibatches: int) -> None:
    expected = plain_two_steps(minibatches)
    got, results = trained(tiny_config(minibatches=minibatches))
    assert [r.outcome for r in results] == ["applied", "applied"]
    assert differ(got, {n: expected[n] for n in got}) < 2e-5


def replayed(config: Config, factors: dict[int, float]) -> dict[str, Tensor]:
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    for version in range(2):
        batch = flatten(episodes(version), range(4), loss_weights=factors)
        train_step(backend, objective, batch, config.learner, version=version)
    return {n: t.clone() for n, t in backend.weights()}


@pytest.mark.parametrize("tokens", [128, 100_000])
def test_a_replayed_groups_factor_multiplies_its_loss_and_nothing_else(tokens: int) -> None:
    """Not its baseline, not the number of tokens that the sum is divided by."""
    factors = {0: 0.25, 2: 0.6}
    got = replayed(tiny_config(tokens_per_micro_batch=tokens), factors)
    expected = plain_two_steps(1, factors)
    assert differ(got, {n: expected[n] for n in got}) < 2e-5
    assert differ(got, trained(tiny_config())[0]) > 1e-4


@pytest.mark.parametrize("learner", [{}, {"minibatches": 2, "loss": "ppo"}, {"kl_coef": 0.1, "entropy_coef": 0.05}])
def test_factors_of_one_change_no_bit(learner: dict[str, Any]) -> None:
    config = tiny_config(**learner)
    plain, _ = trained(config)
    assert differ(plain, replayed(config, {1: 1.0, 3: 1.0})) == 0
    objective = Objective(config.learner)
    # Also where they are multiplied with, since one group of the batch has another factor.
    batch = flatten(episodes(0), range(4), loss_weights={3: 0.5})
    ones = dataclasses.replace(batch, loss_weights=torch.ones(len(batch)))
    assert objective.token_weights(batch) is not None
    assert objective.token_weights(ones) is None
    rows = (batch.groups < 3).nonzero()[:, 0]
    assert objective.token_weights(batch.take(rows)) is None
    per_token = torch.randn(len(batch.token_ids))
    norm = objective.norm(ones)
    objective.token_weights = lambda _: torch.ones(len(per_token))  # type: ignore[method-assign]
    times_one = objective.aggregate(per_token, ones, norm, ones.mask)
    objective.token_weights = lambda _: None  # type: ignore[method-assign]
    assert torch.equal(times_one, objective.aggregate(per_token, ones, norm, ones.mask))


OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"minibatches": 2},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": "prompt_mean"},
    {"entropy_coef": 0.05},
    {"advantage": "gdpo"},
    {"corrections": ({"name": "tis", "level": "sequence", "cap": 3.0}, {"name": "icepop"})},
    {"corrections": ({"name": "tis", "normalize": True},), "entropy_coef": 0.05},
    {"corrections": ({"name": "mis", "low": 0.8, "high": 1.2},), "aggregation_options": {"denominator": "kept"}},
    {"loss": "ppo", "minibatches": 2, "corrections": ({"name": "clamp", "high": 1.5},)},
]


@pytest.mark.parametrize(
    "learner", OBJECTIVES, ids=lambda d: "-".join(f"{k}={v}" for k, v in d.items())[:60] or "default"
)
def test_micro_batches_do_not_change_the_result(learner: dict[str, Any]) -> None:
    few, said = trained(tiny_config(tokens_per_micro_batch=100_000, **learner))
    many, alike = trained(tiny_config(tokens_per_micro_batch=130, **learner))
    assert differ(few, many) < 1e-5
    assert [r.record.loss for r in alike] == pytest.approx([r.record.loss for r in said], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_whole_mini_batch_at_once_is_the_same_as_part_by_part(
    monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    config = tiny_config(tokens_per_micro_batch=130, minibatches=minibatches, entropy_coef=0.02)
    by_parts, a = trained(config)
    monkeypatch.setattr(Functions, "row_by_row", lambda _: False)
    whole, b = trained(config)
    assert differ(by_parts, whole) < 1e-5
    torch.testing.assert_close(a[1].record.weights, b[1].record.weights, atol=1e-4, rtol=1e-4)


class _Counting(TorchBackend):
    extra = 0

    def logprobs(self, *args: Any, **kwargs: Any) -> Any:
        self.extra += 1
        return super().logprobs(*args, **kwargs)


def test_one_update_makes_no_extra_forward_and_is_identical_to_one_that_does() -> None:
    config = tiny_config()
    plain, forced = (_Counting(config, tiny_model(), device="cpu") for _ in range(2))
    plain.extra = forced.extra = 0
    objective = Objective(config.learner)
    train_step(plain, objective, a_batch(), config.learner, version=0)
    assert plain.extra == 0
    objective.advantage_needs_logprobs = True
    train_step(forced, objective, a_batch(), config.learner, version=0)
    assert forced.extra == 1
    assert differ(dict(plain.weights()), dict(forced.weights())) == 0.0


OWN_LOSS = """
import torch
from asyncrl.learner.losses import PolicyLoss, loss


@loss(linear_in_advantage=True, row_by_row=True)
def declared(inputs):
    per_token = torch.where(inputs.mask, -inputs.advantages * inputs.current, 0.0)
    return PolicyLoss(per_token, metrics={}, clipped=torch.zeros_like(inputs.mask))


def undeclared(inputs):
    return declared(inputs)
"""


def test_a_users_loss_that_declares_its_properties_saves_a_forward_pass(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_LOSS)
    weights: dict[str, dict[str, Tensor]] = {}
    passes: dict[str, int] = {}
    for name in ("declared", "undeclared"):
        config = tiny_config(loss=f"{own}:{name}", tokens_per_micro_batch=130)
        backend = _Counting(config, tiny_model(), device="cpu")
        backend.extra = 0
        train_step(backend, Objective(config.learner), a_batch(), config.learner, version=0)
        passes[name] = backend.extra
        weights[name] = {n: t.clone() for n, t in backend.weights()}
    assert passes == {"declared": 0, "undeclared": 1}
    assert differ(weights["declared"], weights["undeclared"]) < 1e-5


LINEAR = sorted(n for n, fn in LOSSES.items() if properties_of(fn).linear_in_advantage)
QUICK = ("decoupled_ppo", "ppo", "reinforce")
"""The others are played by `make test-system`."""


@pytest.mark.parametrize("loss", [pytest.param(n, marks=() if n in QUICK else pytest.mark.system) for n in LINEAR])
def test_rows_without_advantage_need_no_gradient(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    # Group 1 is all alike, and so is every row of it; mini-batch 2 of 2 holds nothing else.
    def alike(seed: int) -> Batch:
        made = [dataclasses.replace(t, reward=1.0) if t.id.group in (1, 2, 3) else t for t in episodes(seed)]
        return flatten(made, range(4))

    def weights(config: Config) -> tuple[dict[str, Tensor], StepResult]:
        backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
        results = [train_step(backend, objective, alike(v), config.learner, version=v) for v in range(2)]
        return {n: t.clone() for n, t in backend.weights()}, results[-1]

    for minibatches in (1, 2):
        config = tiny_config(loss=loss, minibatches=minibatches, tokens_per_micro_batch=130)
        quick, a = weights(config)
        with monkeypatch.context() as patched:
            patched.setattr(Functions, "linear_in_advantage", lambda _: False)
            slow, b = weights(config)
        assert differ(quick, slow) < 2e-5
        for name in ("current", "entropy", "weights", "proximal"):
            torch.testing.assert_close(getattr(a.record, name), getattr(b.record, name), atol=2e-3, rtol=2e-3)
        assert a.record.loss == pytest.approx(b.record.loss, abs=1e-5)


def test_the_same_batches_give_the_same_bits() -> None:
    config = tiny_config(minibatches=2, tokens_per_micro_batch=130)
    assert differ(trained(config)[0], trained(config)[0]) == 0.0


def state(backend: TorchBackend) -> dict[str, Tensor]:
    optimizer = backend._optimizer.state_dict()["state"]
    moments = {f"{i}.{k}": torch.as_tensor(v).clone() for i, s in optimizer.items() for k, v in s.items()}
    return {n: t.clone() for n, t in backend.weights()} | moments


def test_guard_on_the_effective_sample_size_applies_nothing() -> None:
    config = tiny_config(min_ess=0.9999)
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    generous = config.learner.model_copy(update={"min_ess": 0.0})
    train_step(backend, objective, a_batch(), generous, version=0)
    before = state(backend)
    result = train_step(backend, objective, a_batch(1), config.learner, version=1)
    assert result.outcome == "guard"
    assert "learner.min_ess" in result.why
    assert differ(state(backend), before) == 0.0
    # The refused gradient is gone: the next step is as if it had never been.
    train_step(backend, objective, a_batch(2), generous, version=1)
    other = TorchBackend(config, tiny_model(), device="cpu")
    train_step(other, objective, a_batch(), generous, version=0)
    train_step(other, objective, a_batch(2), generous, version=1)
    assert differ(state(backend), state(other)) == 0.0


@pytest.mark.parametrize(("minibatches", "after"), [(1, 1), (2, 2)])
def test_guard_on_not_a_number_undoes_the_updates_before_it(
    minibatches: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaking_loss, "calls", 0)
    config = tiny_config(
        minibatches=minibatches,
        tokens_per_micro_batch=100_000,
        loss="tests.learner.breaking_loss:loss_that_breaks",
        loss_options={"after": after},
    )
    objective = Objective(config.learner)  # rehearses the loss: call 1
    backend = TorchBackend(config, tiny_model(), device="cpu")
    before = state(backend)
    result = train_step(backend, objective, a_batch(), config.learner, version=0)
    assert result.outcome == "guard"
    assert "loss is nan" in result.why
    assert breaking_loss.calls == after + 1
    assert differ(state(backend), before) == 0.0


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"loss": "pppo"}, r"learner.loss: 'pppo'.*did you mean 'ppo'"),
        ({"loss_options": {"clip_hi": 0.3}}, r"learner.loss_options.clip_hi"),
        ({"loss_options": {"weights": 1}}, r"learner.loss_options.weights: is passed"),
        ({"unsafe": True, "corrections": ({"level": "token"},)}, r"corrections\[0\].*needs a name"),
        ({"corrections": ({"name": "tis", "cap": "2"},)}, r"corrections\[0\].cap"),
        ({"aggregation": "seq_mean_token_sum_norm"}, r"learner.aggregation_options.norm"),
        ({"aggregation_options": {"denominator": "some"}}, r"expected all or kept"),
        ({"loss_options": {"dual_clip": 0.5}}, r"dual_clip"),
        ({"advantage": "asyncrl.learner.advantages.returns:gae"}, r"returns:gae'.*values under learner.critic"),
        ({"advantage": "asyncrl.learner.advantages.returns:remax"}, r"returns:remax'.*greedy episode's reward"),
        ({"kl": "k9"}, r"learner.kl"),
    ],
)
def test_an_objective_that_cannot_work_is_refused_at_start(learner: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Objective(tiny_config(**learner).learner)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_series_is_in_the_table_and_finite(minibatches: int) -> None:
    config = tiny_config(minibatches=minibatches, tokens_per_micro_batch=130)
    backend, objective = TorchBackend(config, tiny_model(), device="cpu"), Objective(config.learner)
    batch = a_batch()
    result = train_step(backend, objective, batch, config.learner, version=3)
    values = step_metrics(objective, batch, episodes(), result, version=3, success="success")
    check(values)
    assert all(np.isfinite(v) for v in values.values())
    tokens = sum(t.num_policy_tokens for t in episodes())
    stale = [3 - int(v) for t in episodes() for row in t.rows for v in row.versions[row.mask]]
    assert len(stale) == tokens
    assert values["staleness/max"] == max(stale)
    assert values["staleness/mean"] == pytest.approx(np.mean(stale))
    for s in range(4):
        assert values[f"correction/ess/{s}"] <= 1
        assert values[f"staleness/trained_tokens/{s}"] == pytest.approx(stale.count(s) / tokens)
    assert values["reward/mean"] == pytest.approx(np.mean([t.reward for t in episodes()]))
    assert 0 < values["correction/ess"] <= 1
    assert values["weights/entropy"] > 1
