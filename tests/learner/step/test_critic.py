"""PPO with a critic, against plain loops over rows and tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import get_world_size

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses.value import explained_variance
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.ragged import spread
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.train_step import StepResult
from asyncrl.learner.trainer import Trainer
from asyncrl.tracking.series import check
from asyncrl.trajectory import Trajectory
from tests.learner import breaking_loss
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.tiny import random_trajectory, tiny_config, tiny_model

LR, CRITIC_LR = 1e-3, 3e-3
GAE: dict[str, Any] = {"advantage": "gae", "lr": LR, "critic_lr": CRITIC_LR}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    tiny_model("llama").save_pretrained(folder)
    return folder


def config_of(model: Path, **learner: Any) -> Config:
    config = tiny_config(**learner)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})


def a_trainer(model: Path, **learner: Any) -> tuple[Config, Trainer]:
    config = config_of(model, **learner)
    return config, Trainer(config, build(config), Objective(config.learner), build)


def build(config: Config) -> TorchBackend:
    return TorchBackend(config, device="cpu")


def episodes(seed: int = 0) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    made = [random_trajectory(g, i, rng, rows=1 + (i == 1), versions=(0, 3)) for g in range(4) for i in range(4)]
    return [dataclasses.replace(t, reward=float(t.id.index % 2) + 0.1 * t.id.group) for t in made]


def a_batch(seed: int = 0, mask_before: int | None = None) -> Batch:
    return flatten(episodes(seed), range(4), mask_before)


def trained(trainer: Trainer, steps: int = 2, start: int = 0) -> list[StepResult]:
    return [trainer.train(a_batch(v), v) for v in range(start, start + steps)]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of the policy and of the critic."""
    critic = trainer._companions.critic
    assert critic is not None
    found = {n: t.clone() for n, t in trainer.backend.weights()}
    found |= {f"head.{n}": t.clone() for n, t in critic._head.state_dict().items()}
    if critic._trunk is not None:
        found |= {f"critic.{n}": t.clone() for n, t in critic._trunk.weights()}
    return found


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def plain_two_steps(kind: str) -> dict[str, Tensor]:
    """GAE (gamma 1, lam 0.9, whitened), decoupled PPO, token TIS, value loss clipped at 0.2, written as loops."""
    policy = tiny_model().eval()
    trunk = policy if kind == "shared" else tiny_model().eval()
    head = torch.nn.Linear(32, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)

    def adamw(module: torch.nn.Module, lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    optimizers = [adamw(policy, LR), adamw(head, CRITIC_LR)]
    if kind == "separate":
        optimizers.append(adamw(trunk, CRITIC_LR))

    def scored(row: Any) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(row.token_ids.tolist())
        logprobs = policy(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        states = trunk(ids[None], output_hidden_states=True).hidden_states[-1][0]
        return logprobs, head(states)[:-1, 0]

    for step in range(2):
        total, value_total, count = torch.zeros(()), torch.zeros(()), 0
        found: list[tuple[Tensor, Tensor, float, float, float]] = []
        for t in episodes(step):
            places = [(r, at) for r, row in enumerate(t.rows) for at in np.flatnonzero(row.mask)]
            rows = [scored(row) for row in t.rows]
            current = [rows[r][0][at - 1] for r, at in places]
            values = [rows[r][1][at - 1] for r, at in places]
            ahead, after = 0.0, 0.0
            gae = []
            for i in reversed(range(len(places))):
                reward = t.reward if i == len(places) - 1 else 0.0
                ahead = reward + after - float(values[i].detach()) + 0.9 * ahead
                after = float(values[i].detach())
                gae.append(ahead)
            for (r, at), c, v, a in zip(places, current, values, reversed(gae), strict=True):
                found.append((c, v, a, a + float(v.detach()), float(t.rows[r].logprobs[at])))
        every = torch.tensor([a for _, _, a, _, _ in found])
        whitened = (every - every.mean()) / (every.var() + 1e-8).sqrt()
        for (c, v, _, target, behaviour), a in zip(found, whitened.tolist(), strict=True):
            weight = min(np.exp(np.clip(float(c.detach()) - behaviour, -20, 20)), 2.0)
            ratio = (c - c.detach()).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
            total = total + weight * (loss.clamp(max=-3.0 * a) if a < 0 else loss)
            near = v.detach() + (v - v.detach()).clamp(-0.2, 0.2)
            value_total = value_total + 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2)
            count += 1
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((total + value_total) / count).backward()
        for module in (policy, head) if kind == "shared" else (policy, head, trunk):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    expected = dict(policy.state_dict()) | {f"head.{n}": x for n, x in head.state_dict().items()}
    if kind == "separate":
        expected |= {f"critic.{n}": x for n, x in trunk.state_dict().items()}
    return {n: x.detach() for n, x in expected.items()}


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_two_steps_equal_a_plain_loop(model: Path, kind: str) -> None:
    _, trainer = a_trainer(model, **GAE, critic=kind, advantage_options={"lam": 0.9}, value_options={"clip": 0.2})
    first, second = trained(trainer)
    assert first.record.values is not None
    assert not first.record.values.any(), "the head begins at 0"
    got, expected = weights(trainer), plain_two_steps(kind)
    assert differ(got, {n: expected[n] for n in got}) < 2e-5
    assert second.record.values is not None
    assert second.record.values[a_batch(1).mask].abs().min() > 0
    assert second.record.value_loss > 0


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize(
    "learner",
    [{"minibatches": 2}, {"corrections": ({"name": "tis", "normalize": True},), "entropy_coef": 0.02}],
    ids=["by parts", "whole"],
)
def test_micro_batches_do_not_change_the_result(model: Path, kind: str, learner: dict[str, Any]) -> None:
    found = []
    for limit in (100_000, 130):
        _, trainer = a_trainer(model, **GAE, critic=kind, tokens_per_micro_batch=limit, **learner)
        trained(trainer)
        found.append(weights(trainer))
    assert differ(*found) < 1e-5


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_in_the_warm_up_only_the_critic_learns(model: Path, kind: str) -> None:
    _, trainer = a_trainer(model, **GAE, critic=kind, critic_warmup_steps=2)
    before = weights(trainer)
    results = trained(trainer, 2)
    after = weights(trainer)
    assert [r.outcome for r in results] == ["applied", "applied"]
    assert results[-1].record.lr == 0.0
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert {"head.weight", "head.bias"} <= moved
    assert all(n.startswith(("head.", "critic.")) for n in moved)
    assert any(n.startswith("critic.") for n in moved) == (kind == "separate")
    trained(trainer, 1, start=2)
    assert any(not torch.equal(t, after[n]) for n, t in trainer.backend.weights())


@pytest.mark.parametrize(
    ("r", "kind"),
    [
        pytest.param(0, "shared", marks=pytest.mark.system),
        (0, "separate"),
        (4, "shared"),
        pytest.param(4, "separate", marks=pytest.mark.system),
    ],
    ids=["all-shared", "all-separate", "lora-shared", "lora-separate"],
)
@pytest.mark.system
def test_save_and_load_go_on_bit_for_bit(model: Path, tmp_path: Path, kind: str, r: int) -> None:
    given = GAE | {"minibatches": 2, "lora": {"r": r}}
    _, first = a_trainer(model, **given, critic=kind)
    trained(first, 2)
    first.save(tmp_path)
    trained(first, 2, start=2)
    _, second = a_trainer(model, **given, critic=kind)
    second.load(tmp_path)
    trained(second, 2, start=2)
    assert differ(weights(first), weights(second)) == 0.0
    _, other = a_trainer(model, **given, critic="separate" if kind == "shared" else "shared")
    with pytest.raises(RunError, match=r"was not written with learner\.critic"):
        other.load(tmp_path)


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_guard_undoes_the_critic_too(model: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaking_loss, "calls", 0)
    # Called once in the rehearsal and once an update: not a number in the second update of the second step.
    breaks = {"loss": "tests.learner.breaking_loss:loss_that_breaks", "loss_options": {"after": 4}}
    _, trainer = a_trainer(model, **GAE, critic=kind, minibatches=2, tokens_per_micro_batch=100_000, **breaks)
    trained(trainer, 1)
    before = weights(trainer)
    result = trainer.train(a_batch(1), 1)
    assert result.outcome == "guard"
    assert len(result.record.critic_grad_norms) == 2, "one update was made, and undone"
    assert differ(weights(trainer), before) == 0.0


def test_values_are_known_where_the_loss_is_masked_for_age(model: Path) -> None:
    _, trainer = a_trainer(model, **GAE, critic="separate")
    trained(trainer, 1)
    result = trainer.train(a_batch(1, mask_before=2), 1)
    batch = a_batch(1, mask_before=2)
    assert result.record.values is not None
    assert result.record.values[batch.sampled].abs().min() > 0
    assert not result.record.values[~batch.sampled].any()
    assert (batch.sampled & ~batch.mask).any()
    error = (result.record.values - result.record.returns)[batch.mask]
    assert result.record.value_loss == pytest.approx(0.5 * float(error.square().mean()), rel=1e-4)


def test_an_episode_that_is_drawn_twice_counts_twice_for_the_critic_too(model: Path) -> None:
    _, trainer = a_trainer(model, **GAE, critic="separate", pf_ppo="pow")
    trained(trainer, 1)
    result, batch = trainer.train(a_batch(1), 1), a_batch(1)
    drawn = trainer.objective.prepared(batch, 1).loss_weights
    assert drawn.max() > 1
    assert result.record.values is not None
    error = (result.record.values - result.record.returns).square() * spread(drawn, batch.lengths, len(batch.mask))
    assert result.record.value_loss == pytest.approx(0.5 * float(error[batch.mask].mean()), rel=1e-4)


@pytest.mark.system
def test_the_critic_learns_and_says_so(model: Path) -> None:
    _, trainer = a_trainer(model, **GAE | {"lr": 0.0, "critic_lr": 1e-2}, critic="separate")
    found = []
    for v in range(12):
        result = trainer.train(a_batch(), v)
        values = step_metrics(trainer.objective, a_batch(), episodes(), result, version=3, success="success")
        check(values)
        found.append(values)
    assert found[0]["weights/explained_variance"] == 0.0
    assert found[-1]["weights/explained_variance"] > 0.5
    assert found[-1]["weights/value_loss"] < 0.5 * found[0]["weights/value_loss"]
    expected = float(result.record.returns[a_batch().mask].mean())
    assert found[-1]["weights/value_mean"] == pytest.approx(expected, abs=0.3)
    assert found[-1]["weights/critic_grad_norm"] > 0


def test_explained_variance() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns, mask) == 0.0
    assert explained_variance(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.ones(4), mask) == 0.0
    assert explained_variance(torch.tensor([1.5, 2.0, 2.5, 0.0]), returns, mask) == pytest.approx(0.75)


def on_a_rank(model: Path, folder: Path, kind: str) -> tuple[dict[str, Tensor], bool]:
    """Two steps, a checkpoint, one more; then that one again from the checkpoint."""
    config = config_of(model, **GAE, critic=kind, tokens_per_micro_batch=130, backend="fsdp2", ranks=get_world_size())
    trainer = Trainer(config, Fsdp2Backend(config), Objective(config.learner), Fsdp2Backend)
    trained(trainer, 2)
    trainer.save(folder)
    torch.distributed.barrier()
    trained(trainer, 1, start=2)
    again = Trainer(config, Fsdp2Backend(config), Objective(config.learner), Fsdp2Backend)
    again.load(folder)
    trained(again, 1, start=2)
    found = weights(trainer)
    return found, all(torch.equal(t, found[n]) for n, t in weights(again).items())


@pytest.mark.parametrize("kind", ["shared", pytest.param("separate", marks=pytest.mark.system)])
def test_two_ranks_train_what_one_process_trains(model: Path, tmp_path: Path, kind: str) -> None:
    _, alone = a_trainer(model, **GAE, critic=kind)
    trained(alone, 3)
    first, second = on_kept_ranks(2, on_a_rank, model, tmp_path, kind)
    assert differ(weights(alone), first[0]) < 2e-5
    assert first[1]
    assert second[1]
    assert all(torch.equal(second[0][f"head.{n}"], first[0][f"head.{n}"]) for n in ("weight", "bias"))


def test_a_second_model_resumes_though_its_own_output_embedding_never_has_a_gradient(
    untied: Path, tmp_path: Path
) -> None:
    found, same = on_kept_ranks(1, on_a_rank, untied, tmp_path, "separate")[0]
    assert same
    assert torch.equal(found["critic.lm_head.weight"], tiny_model("llama").state_dict()["lm_head.weight"])


def test_a_head_is_read_where_the_gpu_that_it_was_written_from_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = a_trainer(model, **GAE, critic="shared")
    trained(first, 1)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.serialization, "location_tag", lambda _: "cuda:99")
        first._companions.snapshot()(tmp_path)
    _, second = a_trainer(model, **GAE, critic="shared")
    second._companions.load(tmp_path)
    kept, read = weights(first), weights(second)
    assert all(torch.equal(read[n], kept[n]) for n in ("head.weight", "head.bias"))
    assert kept["head.weight"].any()


class _Blind(TorchBackend):
    """A backend of somebody's own that shows no states."""

    def logprobs(self, *args: Any, **kwargs: Any) -> Any:
        return [dataclasses.replace(s, hidden=None) for s in super().logprobs(*args, **kwargs)]


def test_a_backend_without_states_is_refused(model: Path) -> None:
    config, _ = a_trainer(model, **GAE, critic="shared")
    with pytest.raises(ConfigError, match="gives it no hidden states"):
        Trainer(config, _Blind(config, device="cpu"), Objective(config.learner))
