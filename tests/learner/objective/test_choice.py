"""Every choice of the config that changes what is trained on, in the real training step, against its formula."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.rules import warnings
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.advantages import ESTIMATORS, Advantages, EstimatorInputs
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.objective.kl import KL, AdaptiveKL
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.objective.shaping import pf_ppo_draws
from asyncrl.learner.ragged import masked, masked_mean
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.series import check
from asyncrl.trajectory import Trajectory
from tests.learner.flat_batches import estimator_inputs, split
from tests.learner.step.test_train_step import differ, episodes
from tests.learner.tiny import tiny_config, tiny_model

GAE = {"advantage": "gae", "critic": "separate"}
KL_IN_LOSS = {"kl_coef": 0.5, "lr": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


def build(config: Config) -> TorchBackend:
    return TorchBackend(config, device="cpu")


def a_trainer(model: Path, **learner: Any) -> Trainer:
    config = tiny_config(**learner)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    return Trainer(config, build(config), Objective(config.learner), build)


def played(seed: int = 0) -> list[Trajectory]:
    """Two named rewards; some episodes run into a limit."""
    return [
        dataclasses.replace(
            t,
            rewards={"success": float(t.id.index % 2), "format": float(t.id.index < 3)},
            stop_reason="max_tokens" if t.id.index == 3 else "done",
            turns=1 + t.id.index,
        )
        for t in episodes(seed)
    ]


def a_batch(seed: int = 0) -> Batch:
    return flatten(played(seed), range(4))


def trained(trainer: Trainer, steps: int = 2) -> tuple[dict[str, Tensor], list[StepResult]]:
    results = [trainer.train(a_batch(v), v) for v in range(steps)]
    return {n: t.clone() for n, t in trainer.backend.weights()}, results


def of(name: str, batch: Batch, **given: Any) -> Tensor:
    fields, options = split(given, EstimatorInputs)
    layout = (fields.pop("rewards", batch.rewards), batch.mask, batch.lengths, batch.groups)
    return ESTIMATORS[name](estimator_inputs(*layout, episodes=batch.episodes, **fields), **options).advantages


def rewards_of(batch: Batch, by_episode: list[float]) -> Tensor:
    """[T]: paid on the last policy token of the episode."""
    paid = torch.zeros_like(batch.rewards)
    ends = batch.lengths.cumsum(0)
    for episode, reward in enumerate(by_episode):
        row = int((batch.episodes == episode).nonzero()[-1])
        start = int(ends[row] - batch.lengths[row])
        paid[start + int(batch.mask[start : int(ends[row])].nonzero()[-1])] = reward
    return paid


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_shaping_changes_the_rewards_one_function_after_another(model: Path) -> None:
    trainer = a_trainer(
        model,
        shaping=(
            {"name": "clip", "bias": 0.5, "scale": 2.0},
            {"name": "overlong_penalty", "max_tokens": 20, "buffer_tokens": 10},
            {"name": "stop_properly", "coefficient": 0.1},
        ),
    )
    _, (result,) = trained(trainer, 1)
    expected = []
    for t in played():
        reward = (t.reward + 0.5) * 2 + min(-(t.num_policy_tokens - 10) / 10, 0.0)
        expected.append(reward * 0.1 if t.stop_reason != "done" else reward)
    same(result.record.advantages, of("grpo", a_batch(), rewards=rewards_of(a_batch(), expected)))
    values = step_metrics(trainer.objective, a_batch(), played(), result, version=3, success="success")
    check(values)
    assert values["reward/shaped"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert values["reward/mean"] == pytest.approx(sum(t.reward for t in played()) / 16)


def test_length_penalty_sees_every_row_of_an_episode(model: Path) -> None:
    trainer = a_trainer(model, advantage="dr_grpo", shaping=({"name": "length_penalty"},))
    _, (result,) = trained(trainer, 1)
    expected = []
    for t in played():
        group = [o for o in played() if o.id.group == t.id.group]

        def relative(count: Any, t: Trajectory = t, group: list[Trajectory] = group) -> float:
            return float(count(t) / max(count(o) for o in group))

        cost = 0.25 * relative(lambda o: o.num_policy_tokens) + 0.1 * relative(lambda o: o.turns)
        cost += 0.1 * relative(lambda o: o.num_tokens - o.num_policy_tokens)
        expected.append(t.reward - sum(o.reward for o in group) / 4 * cost)
    same(result.record.advantages, of("dr_grpo", a_batch(), rewards=rewards_of(a_batch(), expected)))


def test_pf_ppo_is_a_batch_of_what_was_drawn(model: Path) -> None:
    """With a mean over episodes of sums, counting n times and being there n times are the same."""
    options: dict[str, Any] = {"aggregation": "seq_mean_token_sum", "tokens_per_micro_batch": 100_000}
    weights, (result,) = trained(a_trainer(model, pf_ppo="pow", **options), 1)
    batch = a_batch()
    rewards = torch.tensor([t.reward for t in played()])
    draws = pf_ppo_draws(rewards, generator=torch.Generator().manual_seed(0)).long()
    assert draws.min() == 0
    assert draws.max() > 1
    rows = [torch.nonzero(batch.episodes == e)[:, 0] for e, n in enumerate(draws.tolist()) for _ in range(n)]
    copies = batch.take(torch.cat(rows))
    copies = dataclasses.replace(
        copies, episodes=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r) for r in rows]))
    )
    plain = a_trainer(model, **options)
    advantages = torch.cat([result.record.advantages[batch.tokens_of(r)] for r in rows])
    plain.objective.advantages = lambda *_, **__: Advantages(advantages, advantages)  # type: ignore[method-assign]
    plain.train(copies, 0)
    assert differ(weights, dict(plain.backend.weights())) < 2e-5
    few, _ = trained(a_trainer(model, pf_ppo="max_random"), 2)
    many, _ = trained(a_trainer(model, pf_ppo="max_random", tokens_per_micro_batch=130), 2)
    assert differ(few, many) < 1e-5


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_kl_in_the_reward(model: Path, kl: str) -> None:
    trainer = a_trainer(model, kl_coef=0.3, kl_in="reward", kl=kl, advantage="reinforce_pp", lr=1e-2)
    _, (first, second) = trained(trainer)
    same(first.record.advantages, of("reinforce_pp", a_batch()))  # the policy is its own reference still
    batch = a_batch(1)
    (reference,) = trainer.backend.logprobs([batch.packed()], reference=True)
    penalty = masked(KL[kl](second.record.proximal, reference.logprobs), batch.mask)
    assert penalty.abs().max() > 1e-3
    same(second.record.advantages, of("reinforce_pp", batch, rewards=batch.rewards - 0.3 * penalty))
    assert second.record.loss == pytest.approx(second.record.policy_loss, abs=1e-6), "and not in the loss"


def test_a_straight_through_kl_has_its_value_and_the_gradient_of_k2(model: Path) -> None:
    runs = {kl: trained(a_trainer(model, kl=kl, **KL_IN_LOSS)) for kl in ("k3", "k3+", "k2")}
    losses = {kl: [r.record.loss for r in results] for kl, (_, results) in runs.items()}
    assert losses["k3+"][0] == losses["k3"][0] == losses["k2"][0], "no KL yet"
    assert losses["k3+"][1] != losses["k2"][1]
    one = {kl: trained(a_trainer(model, kl=kl, **KL_IN_LOSS), 3)[0] for kl in ("k3", "k3+")}
    assert differ(one["k3"], one["k3+"]) > 1e-5


def test_options_of_the_kl(model: Path) -> None:
    kl = {"kl_coef": 0.5, "lr": 5e-2, "kl": "k3"}
    limited = trained(a_trainer(model, kl_options={"limit": 0.01}, **kl))[1][-1]
    assert limited.record.reference_kl.max() == pytest.approx(0.01)
    unlimited = trained(a_trainer(model, kl_options={"limit": None}, **kl))[1][-1]
    assert unlimited.record.reference_kl.max() > 0.01


@pytest.mark.parametrize("under", ["proximal", "behaviour"])
def test_an_unbiased_kl_is_weighted(model: Path, under: str) -> None:
    trainer = a_trainer(model, kl_unbiased=under, kl="k3", **KL_IN_LOSS)
    _, (_, second) = trained(trainer)
    batch, record = a_batch(1), second.record
    (reference,) = trainer.backend.logprobs([batch.packed()], reference=True)
    below = record.proximal if under == "proximal" else batch.behaviour
    kl = KL["k3"](record.current, reference.logprobs) * (record.current - below).clamp(-20, 20).exp()
    same(record.reference_kl, masked(kl, batch.mask))
    assert record.loss - record.policy_loss == pytest.approx(0.5 * float(masked_mean(kl, batch.mask)), rel=1e-3)


@pytest.mark.parametrize(("kl", "where"), [("k1", "weighted"), ("k2", "estimate"), ("k3", "weighted")])
def test_the_limit_of_an_unbiased_kl_is_before_or_after_its_weight(model: Path, kl: str, where: str) -> None:
    """NeMo clamps the estimate and then weights it, slime weights it and then clamps."""
    limit = 1e-3
    options = {"kl": kl, "kl_options": {"limit": limit}, "kl_limit": where, "kl_unbiased": "behaviour"}
    trainer = a_trainer(model, **KL_IN_LOSS | options)
    _, (_, second) = trained(trainer)
    batch, record = a_batch(1), second.record
    (reference,) = trainer.backend.logprobs([batch.packed()], reference=True)
    weight = (record.current - batch.behaviour).clamp(-20, 20).exp()
    estimate = KL[kl](record.current, reference.logprobs, limit=None)
    if where == "weighted":
        expected = (estimate * weight).clamp(-limit, limit)
    else:
        expected = estimate.clamp(-limit, limit) * weight
    same(record.reference_kl, masked(expected, batch.mask))


def test_the_adaptive_controller_steers_and_is_saved(model: Path, tmp_path: Path) -> None:
    adaptive: dict[str, Any] = {
        "kl_controller": "adaptive",
        "kl_controller_options": {"target": 1e-3, "horizon": 64},
        **KL_IN_LOSS,
    }
    trainer = a_trainer(model, **adaptive)
    _, results = trained(trainer, 2)
    expected = AdaptiveKL(0.5, 1e-3, 64)
    for v, result in enumerate(results):
        assert result.record.kl_coef == pytest.approx(expected.value)
        expected.update(float(masked_mean(result.record.reference_kl, a_batch(v).mask)), 16)
    assert trainer._companions.kl.value == pytest.approx(expected.value)
    assert expected.value != 0.5
    trainer.save(tmp_path)
    again = a_trainer(model, **adaptive)
    again.load(tmp_path)
    assert again._companions.kl.value == trainer._companions.kl.value
    a, b = trainer.train(a_batch(2), 2), again.train(a_batch(2), 2)
    assert a.record.loss == b.record.loss
    assert differ(dict(trainer.backend.weights()), dict(again.backend.weights())) == 0.0
    (tmp_path / "kl.json").unlink()
    with pytest.raises(RunError, match=r"has no kl\.json"):
        again.load(tmp_path)


def test_the_reference_is_refreshed_and_saved(model: Path, tmp_path: Path) -> None:
    trainer = a_trainer(model, reference_every=2, **KL_IN_LOSS)
    measured = [float(r.record.reference_kl.abs().max()) for r in trained(trainer, 4)[1]]
    # One update a step: what it is measured of is the policy at the start of the step.
    assert [m > 1e-4 for m in measured] == [False, True, False, True]
    trainer.save(tmp_path)
    for v in (4, 5):
        trainer.train(a_batch(v), v)
    again = a_trainer(model, reference_every=2, **KL_IN_LOSS)
    again.load(tmp_path)
    for v in (4, 5):
        again.train(a_batch(v), v)
    assert differ(dict(trainer.backend.weights()), dict(again.backend.weights())) == 0.0
    frozen = a_trainer(model, **KL_IN_LOSS)
    assert all(r.record.reference_kl.abs().max() > 1e-4 for r in trained(frozen, 3)[1][1:])


def test_gdpo_weighs_rewards_by_name(model: Path) -> None:
    by_name = a_trainer(model, advantage="gdpo", advantage_options={"weights": {"success": 1.0, "format": 0.2}})
    _, (result,) = trained(by_name, 1)
    batch = a_batch()
    assert batch.reward_names == ("format", "success")
    expected = of("gdpo", batch, reward_components=batch.reward_components, weights=[0.2, 1.0])
    same(result.record.advantages, expected)
    _, (listed,) = trained(a_trainer(model, advantage="gdpo", advantage_options={"weights": [0.2, 1.0]}), 1)
    same(listed.record.advantages, expected)
    wrong = a_trainer(model, advantage="gdpo", advantage_options={"weights": {"style": 1.0}})
    with pytest.raises(ConfigError, match=r"learner.advantage is 'gdpo'.*'style'.*format, success"):
        wrong.train(batch, 0)


def test_the_optimal_token_baseline_reads_the_whole_distribution(model: Path) -> None:
    trainer = a_trainer(model, advantage="optimal_token_baseline", advantage_options={"variant": "token"})
    _, (result,) = trained(trainer, 1)
    batch = a_batch()
    squares = torch.zeros(len(batch.token_ids))
    at, policy = 0, tiny_model().eval()
    for t in played():
        for row in t.rows:
            p = policy(torch.tensor(row.token_ids.tolist())[None]).logits[0].softmax(-1).detach()
            squares[at + 1 : at + len(row)] = p.square().sum(-1)[:-1]
            at += len(row)
    expected = of(
        "optimal_token_baseline",
        batch,
        logprobs=result.record.proximal,
        sum_pi_sq=masked(squares, batch.mask),
        variant="token",
    )
    same(result.record.advantages, expected)


@pytest.mark.parametrize("name", ["gae", "vapo_gae", "vtrace"])
def test_estimators_with_values(model: Path, name: str) -> None:
    corrections = {"corrections": ()} if name == "vtrace" else {}
    trainer = a_trainer(model, advantage=name, critic="separate", critic_lr=1e-2, **corrections)
    _, (_, second) = trained(trainer)
    batch, record = a_batch(1), second.record
    assert record.values is not None
    assert record.values[batch.mask].abs().min() > 0
    extra = {"logprobs": record.proximal, "behaviour": batch.behaviour} if name == "vtrace" else {}
    same(record.advantages, of(name, batch, values=record.values, **extra))


def test_remax_subtracts_the_reward_of_the_greedy_episode_which_carries_no_loss(model: Path) -> None:
    trainer = a_trainer(model, advantage="remax", greedy_baseline=True)
    batch = flatten(played(), range(4), greedy_baseline=True)
    rewards = {(t.id.group, t.id.index): t.reward for t in played()}
    assert len(set(rewards.values())) > 1
    assert batch.baseline.tolist() == [rewards[g, 0] for g in batch.groups.tolist()]
    result = trainer.train(batch, 0)
    assert result.record is not None
    at = 0
    for t in sorted(played(), key=lambda t: (t.id.group, t.id.index)):
        for row in t.rows:
            cells, at = slice(at, at + len(row)), at + len(row)
            assert bool(batch.mask[cells].any()) == (t.id.index > 0)
            expected = (t.reward - rewards[t.id.group, 0]) * torch.from_numpy(row.mask.astype("float32"))
            same(result.record.advantages[cells], expected)


def test_a_greedy_baseline_needs_the_greedy_episode_of_every_group() -> None:
    with pytest.raises(ValueError, match=r"learner.greedy_baseline"):
        _ = a_batch().baseline


REFUSED = [
    ({"advantage": "gae"}, r"gae, which needs values: set learner.critic"),
    ({"critic": "shared"}, r"learner.advantage grpo reads no values"),
    ({"advantage": "remax"}, r"greedy answer to every prompt: set learner.greedy_baseline"),
    ({"greedy_baseline": True}, r"learner.advantage grpo would take the greedy answer"),
    ({"advantage": "remax", "greedy_baseline": True, "group_size": 1}, r"learner.group_size is 1"),
    ({"advantage": "remax", "greedy_baseline": True, "pf_ppo": "pow"}, r"learner.pf_ppo is pow"),
    ({"critic_warmup_steps": 3}, r"nothing to warm up"),
    ({"kl_in": "reward"}, r"learner.kl_in is reward, while learner.kl_coef is 0"),
    ({"reference_every": 3}, r"learner.reference_every is 3, while learner.kl_coef is 0"),
    ({"kl_controller": "adaptive"}, r"learner.kl_controller is adaptive, while"),
    ({"kl_coef": 0.1, "kl_in": "reward", "kl_unbiased": "proximal"}, r"a reward has no gradient"),
    ({"kl_coef": 0.1, "kl_limit": "weighted"}, r"learner.kl_limit is weighted while learner.kl_unbiased is off"),
    ({"advantage": "gdpo", "shaping": ({"name": "clip"},)}, r"reads the named rewards as they came"),
]


@pytest.mark.parametrize(("learner", "says"), REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(learner: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        tiny_config(**learner)


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"shaping": ({"name": "clipp"},)}, r"learner.shaping\[0\]: 'clipp'.*did you mean 'clip'"),
        ({"shaping": ({"name": "clip", "limits": 3},)}, r"learner.shaping\[0\].limits"),
        ({"shaping": ({"name": "overlong_penalty", "max_tokens": 9, "buffer_tokens": 10},)}, r"buffer_tokens is 10"),
        ({"shaping": ({"name": "stop_properly"},)}, r"learner.shaping\[0\].coefficient"),
        ({**GAE, "value_options": {"clip": -1.0}}, r"learner.value_options: value_loss: clip is -1"),
        ({**GAE, "value_options": {"klip": 0.2}}, r"learner.value_options.klip"),
        ({"kl_coef": 0.1, "kl_options": {"limit": "ten"}}, r"learner.kl_options.limit"),
        ({"kl_coef": 0.1, "kl": "k1", "kl_options": {"cap": 10.0}}, r"learner.kl_options.cap: k1 has no such"),
        ({"advantage": "gdpo", "advantage_options": {"weights": "all"}}, r"learner.advantage_options.weights"),
        ({"advantage_options": {"values": 1}}, r"learner.advantage_options.values: is passed"),
    ],
)
def test_options_are_checked_against_the_signature(learner: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Objective(tiny_config(**learner).learner)


def test_the_controllers_options_are_checked(model: Path) -> None:
    for options, says in (({}, "target"), ({"target": 0.0}, "must be above 0"), ({"target": 0.1, "goal": 1}, "goal")):
        with pytest.raises(ConfigError, match=says):
            a_trainer(model, kl_coef=0.1, kl_controller="adaptive", kl_controller_options=options)


def test_what_outlives_a_step_cannot_be_left_out(model: Path) -> None:
    trainer = a_trainer(model, **GAE)
    learner = tiny_config(**GAE).learner
    with pytest.raises(ValueError, match="companions are missing"):
        train_step(trainer.backend, trainer.objective, a_batch(), learner, version=0)


def test_vtrace_is_corrected_once() -> None:
    given = {"advantage": "vtrace", "critic": "separate"}
    assert any("vtrace" in w for w in warnings(tiny_config(**given)))
    assert not any("vtrace" in w for w in warnings(tiny_config(**given, corrections=())))
