"""On several ranks each computes the loss of its own micro-batches alone, and all know what one process would."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch, flatten
from asyncrl.learner.losses.value import ValueInputs
from asyncrl.learner.objective.objective import Evaluated, Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.train_step import StepResult
from asyncrl.learner.trainer import Trainer
from asyncrl.trajectory import Trajectory
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.step.test_train_step import episodes
from tests.learner.tiny import tiny_config, tiny_model


class _Counting(Objective):
    """Counts the calls of what is differentiated."""

    def __init__(self, *args: Any) -> None:
        self.losses = self.value_losses = 0
        super().__init__(*args)
        self.losses = self.value_losses = 0  # after the rehearsal

    def evaluate(self, *args: Any) -> Evaluated:
        self.losses += 1
        return super().evaluate(*args)

    def value_loss(self, inputs: ValueInputs) -> Tensor:
        self.value_losses += 1
        return super().value_loss(inputs)


def some_episodes(seed: int, groups: int) -> list[Trajectory]:
    """Every fourth group is all alike, and has no gradient."""
    made = episodes(seed, groups)
    return [dataclasses.replace(t, reward=1.0) if t.id.group % 4 == 3 else t for t in made]


def a_batch(seed: int = 0, groups: int = 4) -> Batch:
    return flatten(some_episodes(seed, groups), range(groups))


def config_of(learner: dict[str, Any], model: str) -> Config:
    config = tiny_config(**{"tokens_per_micro_batch": 60, "backend": "fsdp2"} | learner)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


def a_trainer(learner: dict[str, Any], model: str) -> Trainer:
    config = config_of(learner, model)
    kind = Fsdp2Backend if torch.distributed.is_initialized() else TorchBackend

    def build(given: Config) -> TorchBackend:
        return kind(given, tiny_model(), device="cpu")

    return Trainer(config, build(config), _Counting(config.learner), build)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return str(folder)


def calls(learner: dict[str, Any], model: str, groups: int) -> tuple[int, int]:
    trainer = a_trainer(learner, model)
    trainer.train(a_batch(groups=groups), 0)
    assert isinstance(trainer.objective, _Counting)
    return trainer.objective.losses, trainer.objective.value_losses


CRITIC: dict[str, Any] = {"advantage": "gae", "critic_lr": 3e-3}


@pytest.mark.parametrize(
    "learner",
    [
        {},
        pytest.param(CRITIC | {"critic": "shared"}, marks=pytest.mark.system),
        pytest.param(CRITIC | {"critic": "separate"}, marks=pytest.mark.system),
    ],
    ids=["plain", "shared", "separate"],
)
def test_a_rank_computes_the_loss_of_its_own_micro_batches_alone(learner: dict[str, Any], model: str) -> None:
    """At the same rows a rank, the number of calls is that of one process. Before, it grew with the ranks."""
    alone, alone_value = on_kept_ranks(1, calls, learner, model, 4)[0]
    assert alone > 4
    for ranks in (2, 4):
        each = on_kept_ranks(ranks, calls, learner, model, 4 * ranks)
        # Rows of other lengths are cut otherwise: a few micro-batches more or less, and one round that is not full.
        assert max(losses for losses, _ in each) <= alone + 2
        assert sum(losses for losses, _ in each) >= ranks * (alone - 2)
        assert max(value for _, value in each) <= alone_value + 4


@dataclasses.dataclass
class Step:
    outcome: str
    why: str
    record: dict[str, Any]
    metrics: dict[str, float]


def told(trainer: Trainer, batch: Batch, result: StepResult, seed: int) -> Step:
    skipped = ("phases", "proximal_s")
    record = {
        f.name: getattr(result.record, f.name) for f in dataclasses.fields(result.record) if f.name not in skipped
    }
    metrics: dict[str, float] = {}
    if result.outcome == "applied":
        found = step_metrics(trainer.objective, batch, some_episodes(seed, 4), result, version=seed, success="success")
        metrics = {name: x for name, x in found.items() if not name.startswith("throughput/")}
    return Step(result.outcome, result.why, record, metrics)


def trained(learner: dict[str, Any], model: str) -> tuple[list[Step], dict[str, Tensor]]:
    """Two steps, and what there is then."""
    trainer = a_trainer(learner, model)
    steps = [told(trainer, a_batch(v), trainer.train(a_batch(v), v), v) for v in range(2)]
    found = {n: t.clone() for n, t in trainer.backend.weights()}
    companions = trainer._companions
    found["kl coefficient"] = torch.tensor(companions.kl.value, dtype=torch.float64)
    if companions.critic is not None:
        found |= {f"head.{n}": t.clone() for n, t in companions.critic._head.state_dict().items()}
    return steps, found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


OBJECTIVES: dict[str, dict[str, Any]] = {
    "rows without gradient": {"minibatches": 2, "ess_lr": "sqrt"},
    "kl": {
        "minibatches": 2,
        "kl_coef": 0.1,
        "kl_controller": "adaptive",
        "kl_controller_options": {"target": 0.01},
        "entropy_coef": 0.02,
    },
    "at once": {"corrections": ({"name": "tis", "normalize": True},), "entropy_coef": 0.02},
    "in one pass": {"corrections": ({"name": "tis", "normalize": True},), "tokens_per_micro_batch": 100_000},
    "shared critic": CRITIC | {"critic": "shared", "minibatches": 2},
    "separate critic": CRITIC | {"critic": "separate"},
}


QUICK = ("kl", "shared critic")
"""The others are played by `make test-system`."""


@pytest.mark.parametrize(
    "learner",
    [pytest.param(given, marks=() if name in QUICK else pytest.mark.system) for name, given in OBJECTIVES.items()],
    ids=OBJECTIVES,
)
def test_every_rank_has_the_record_of_one_process(learner: dict[str, Any], model: str) -> None:
    expected, weights = trained(learner, model)
    ranks = on_kept_ranks(2, trained, learner, model)
    for n, of_one in enumerate(expected):
        first = ranks[0][0][n]
        for steps, _ in ranks:  # bit for bit: they decide alike
            assert (steps[n].outcome, steps[n].why) == (first.outcome, first.why)
            assert [name for name, x in steps[n].record.items() if not same(x, first.record[name])] == []
        assert first.outcome == of_one.outcome == "applied"
        for name, x in of_one.record.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                torch.testing.assert_close(first.record[name], x, atol=2e-6, rtol=2e-5, msg=name)
            elif isinstance(x, Tensor):
                assert torch.equal(first.record[name], x), name
            elif x is not None:
                assert first.record[name] == pytest.approx(x, rel=1e-5, abs=1e-6), name
        assert first.metrics == pytest.approx(of_one.metrics, rel=1e-4, abs=2e-6)
    for name, x in weights.items():
        torch.testing.assert_close(ranks[0][1][name], x, atol=2e-6, rtol=0, msg=name)
    for name in ("kl coefficient", *(n for n in weights if n.startswith("head."))):
        assert torch.equal(ranks[0][1][name], ranks[1][1][name]), name


def test_a_loss_that_breaks_on_one_rank_is_refused_on_all(model: str) -> None:
    """Its rows are in one micro-batch, so one rank alone meets it."""
    broken = {"loss": "tests.learner.breaking_loss:loss_that_breaks_on_a_row", "minibatches": 2}
    for steps, weights in on_kept_ranks(2, trained, broken, model):
        for step in steps:
            assert (step.outcome, step.why) == ("guard", "loss is nan, expected a finite number")
        assert math.isnan(steps[0].record["loss"])
        before = dict(tiny_model().named_parameters())
        assert all(torch.equal(x, before[n]) for n, x in weights.items() if n in before), "and rolled back"
