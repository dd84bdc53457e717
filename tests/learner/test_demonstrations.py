"""Training on demonstrations is transformers' own cross entropy on the same chats, however rows are packed, on every
backend; beside groups it is one more term of the loss, and the groups know nothing of it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional

from asyncrl.buffer.client.messages import Demonstration
from asyncrl.config import Config, ModelConfig
from asyncrl.data.demonstrations import chat
from asyncrl.errors import RunError
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import Batch
from asyncrl.learner.demonstrations import Rendered, flat
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.demonstration_metrics import metrics_beside, supervised_metrics
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.demonstrations import weight_at
from asyncrl.learner.step.train_step import StepResult, train_step
from asyncrl.learner.trainer import Trainer
from asyncrl.model import load_model, load_tokenizer
from asyncrl.rendering.demonstrations import ShownRow
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.tracking.series import check
from tests.data.demonstrations.chats import said, turns
from tests.learner.backends.backend_cases import CASES, Case, close
from tests.learner.backends.test_backend_conformance import on_ranks_of
from tests.learner.step.test_train_step import a_batch, episodes
from tests.learner.tiny import VOCABULARY, tiny_config, tiny_model

QUICKSTART = ModelConfig(path="quickstart")
CHATS = [turns(n) for n in (1, 2, 3, 8, 11)]


def shown(rows: list[dict[str, Any]]) -> list[Demonstration]:
    texts = [chat.encoded(row, "test") for row in rows]
    return [Demonstration(n, f"line {n}", chat.digest(text).hex(), text) for n, text in enumerate(texts)]


def rendered() -> Rendered:
    return Rendered(TemplateRenderer(load_tokenizer(QUICKSTART)), 256)


def sft_config(**learner: Any) -> Config:
    given = {"loss": "sft", "lr": 1e-3, "tokens_per_micro_batch": 64} | learner
    return Config.model_validate(
        {
            "learner": given,
            "data": {"demonstrations": ("x.jsonl",)},
            "actors": {"count": 0},
            "eval": {"tasks": 0},
        }
    )


def padded(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    """Ids and labels as transformers takes them: one padded batch, -100 where there is no loss."""
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }


def as_transformers_reads_them(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The chats by the tokenizer's own template; loss between `assistant` and the end of its turn."""
    tokenizer = load_tokenizer(QUICKSTART)
    made = []
    for row in rows:
        text = str(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        labels, at = [-100] * len(encoded["input_ids"]), 0
        while (begin := text.find("<|im_start|>assistant\n", at)) >= 0:
            begin += len("<|im_start|>assistant\n")
            at = text.index("<|im_end|>", begin) + len("<|im_end|>")
            for i, (start, _) in enumerate(encoded["offset_mapping"]):
                if begin <= start < at:
                    labels[i] = encoded["input_ids"][i]
        made.append((encoded["input_ids"], labels))
    return padded(made, int(tokenizer.pad_token_id))


@pytest.mark.parametrize("limit", [64, 100_000], ids=["packed", "one pass"])
def test_loss_and_gradient_are_transformers_own_for_the_same_chats(limit: int) -> None:
    model = load_model(QUICKSTART).eval()
    loss = model(**as_transformers_reads_them(CHATS)).loss
    loss.backward()
    expected_loss = float(loss.detach())
    config = sft_config(tokens_per_micro_batch=limit, max_grad_norm=1e9)
    backend = _Kept(config, load_model(QUICKSTART), device="cpu")
    result = train_step(backend, Objective(config.learner), rendered().batch(shown(CHATS)), config.learner, version=0)
    assert result.outcome == "applied"
    assert result.record.loss == pytest.approx(expected_loss, rel=1e-6)
    scale = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    expected = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}
    close({n: g / scale for n, g in backend.gradients.items()}, expected, 1e-5)
    metrics = supervised_metrics(rendered().batch(shown(CHATS)), result)
    check(metrics)
    assert metrics["weights/demonstrations/loss"] == pytest.approx(expected_loss, rel=1e-6)


class _Kept(TorchBackend):
    """Keeps the gradient of the last update."""

    def apply(self, lr: float) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self._model.named_parameters() if p.grad is not None}
        super().apply(lr)


def some_rows(seed: int, count: int = 6) -> list[ShownRow]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in range(count):
        ids = torch.randint(VOCABULARY, (5 + 7 * n,), generator=generator).tolist()
        mask = (torch.rand(len(ids), generator=generator) < 0.5).tolist()
        rows.append(ShownRow(ids, [False, True, *mask[2:]]))
    return rows


def demonstrations(seed: int) -> Batch:
    return flat(list(enumerate(some_rows(seed))))


def plain(model: Any) -> list[float]:
    """Two steps with transformers' own loss and torch's AdamW, of two updates with half of the rows each, padded."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0), []
    for version in range(2):
        rows, total = some_rows(version), 0.0
        for half in (rows[:3], rows[3:]):
            labelled = [(r.ids, [i if m else -100 for i, m in zip(r.ids, r.mask, strict=True)]) for r in half]
            optimizer.zero_grad()
            loss = model(**padded(labelled, 0)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            total += float(loss.detach())
        losses.append(total)
    return losses


def supervised(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    config = sft_config(minibatches=2, **dict(case.learner))
    backend, objective = case.build(config, case.model()), Objective(config.learner)
    results = [train_step(backend, objective, demonstrations(v), config.learner, version=v) for v in range(2)]
    return {n: t.clone() for n, t in backend.weights()}, [r.record.loss for r in results]


def beside(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """Two updates of groups with demonstrations beside them."""
    given = {"weight": 0.5, "per_step": 6}
    config = tiny_config(minibatches=2, tokens_per_micro_batch=64, demonstrations=given, **dict(case.learner))
    backend, objective = case.build(config, case.model()), Objective(config.learner)
    batch = dataclasses.replace(a_batch(), demonstrations=demonstrations(0))
    result = train_step(backend, objective, batch, config.learner, version=0)
    return {n: t.clone() for n, t in backend.weights()}, [result.record.loss, result.record.shown_nats]


MEGATRON = [
    pytest.param(name, marks=pytest.mark.system)
    for name in ("megatron-tp2", "megatron-pp2", "megatron-dp2-sharded-optimizer")
]


@pytest.mark.parametrize("name", ["torch", "torch-lora", "fsdp2-2", *MEGATRON])
def test_every_backend_trains_as_transformers_and_torch_do(name: str, tmp_path: Path) -> None:
    """Two steps of two updates; several ranks too."""
    case = _case(name)
    model: Any = case.model().eval()
    if adapted := case.lora:
        torch.manual_seed(tiny_config().learner.seed)
        model = get_peft_model(model, LoraConfig(**adapted, target_modules="all-linear", task_type="CAUSAL_LM"))
    losses = plain(model)
    expected = dict((model.merge_and_unload() if adapted else model).named_parameters())
    weights, got = on_ranks_of(case, tmp_path / "meet", supervised, case)[0]
    assert got == pytest.approx(losses, rel=1e-5)
    differences = {n: (weights[n] - expected[n].detach()).abs() for n in weights}
    assert max(float(d.max()) for d in differences.values()) < 2.5e-4  # AdamW divides by sizes near rounding
    assert max(float(d.mean()) for d in differences.values()) < 1e-6


@pytest.mark.parametrize("name", ["fsdp2-2", *MEGATRON[:2]])
def test_beside_groups_several_ranks_are_one(name: str, tmp_path: Path) -> None:
    case = _case(name)
    weights, numbers = on_ranks_of(case, tmp_path / "meet", beside, case)[0]
    alone = dataclasses.replace(CASES["torch"], family=case.family)
    expected, of_one = beside(alone)
    assert numbers == pytest.approx(of_one, rel=1e-5)
    close(weights, expected, 2.5e-4)


def _case(name: str) -> Case:
    if name.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
        importlib.import_module("asyncrl.learner.backends.megatron.backend")
    return CASES[name]


OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"tokens_per_micro_batch": 100_000},
    {"corrections": ({"name": "tis", "normalize": True},)},  # looks at all rows: evaluated at once
    {"entropy_coef": 0.05},
]


@pytest.mark.parametrize("learner", OBJECTIVES)
def test_beside_groups_the_gradient_is_the_groups_and_the_weighted_cross_entropy(learner: dict[str, Any]) -> None:
    weight = 0.7
    given = {"weight": weight, "per_step": 6}
    config = tiny_config(max_grad_norm=1e9, demonstrations=given, **learner)

    def stepped(batch: Batch) -> tuple[dict[str, Tensor], StepResult]:
        backend = _Kept(config, tiny_model(), device="cpu")
        result = train_step(backend, Objective(config.learner), batch, config.learner, version=0)
        return backend.gradients, result

    groups, alone = stepped(a_batch())
    both, result = stepped(dataclasses.replace(a_batch(), demonstrations=demonstrations(0)))
    model = tiny_model().eval()
    rows = [(r.ids, [i if m else -100 for i, m in zip(r.ids, r.mask, strict=True)]) for r in some_rows(0)]
    loss = model(**padded(rows, 0)).loss
    loss.backward()
    shown = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    close(both, {n: groups[n] + weight * shown[n] for n in groups}, 2e-6)
    assert result.record.loss == pytest.approx(alone.record.loss + weight * float(loss.detach()), rel=1e-5)
    # The groups know nothing of them.
    assert torch.equal(result.record.advantages, alone.record.advantages)
    assert torch.equal(result.record.weights, alone.record.weights)
    assert result.record.policy_loss == alone.record.policy_loss
    values = metrics_beside(dataclasses.replace(a_batch(), demonstrations=demonstrations(0)), result)
    check(values)
    assert values["weights/demonstrations/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert values["weights/demonstrations/weight"] == weight
    of_groups = step_metrics(Objective(config.learner), a_batch(), episodes(), result, version=3, success="success")
    assert not values.keys() & of_groups.keys()


def test_the_weight_falls_with_its_schedule_and_at_0_nothing_is_computed() -> None:
    config = tiny_config(steps=10, demonstrations={"weight": 0.4, "schedule": "linear"})
    assert [weight_at(config.learner, v) for v in (0, 5, 10)] == pytest.approx([0.4, 0.2, 0.0])
    batch = dataclasses.replace(a_batch(), demonstrations=demonstrations(0))
    backend = TorchBackend(config, tiny_model(), device="cpu")
    result = train_step(backend, Objective(config.learner), batch, config.learner, version=10)
    assert (result.record.shown_tokens, result.record.shown_nats) == (0, 0.0)
    assert metrics_beside(batch, result) == {}


def test_the_users_corrections_reject_no_token_that_nobody_sampled() -> None:
    """A mask by the ratio to a behaviour policy would drop tokens; demonstrations have no such policy."""
    losses = []
    for corrections in ((), ({"name": "icepop"},)):
        config = sft_config(corrections=corrections)
        backend = TorchBackend(config, tiny_model(), device="cpu")
        result = train_step(backend, Objective(config.learner), demonstrations(0), config.learner, version=0)
        assert bool(result.record.keep[demonstrations(0).mask].all())
        losses.append(result.record.loss)
    assert losses[0] == losses[1]


def test_several_updates_of_a_step_cost_no_pass_for_proximal_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sft_config(minibatches=2)
    backend = TorchBackend(config, tiny_model(), device="cpu")
    monkeypatch.setattr(backend, "logprobs", None)
    train_step(backend, Objective(config.learner), demonstrations(0), config.learner, version=0)


def test_the_packed_rows_of_one_demonstration_do_not_see_each_other() -> None:
    """Slow reference: each row alone."""
    model, total, count = tiny_model().eval(), torch.zeros(()), 0
    for row in some_rows(3):
        logits = model(torch.tensor([row.ids])).logits[0]
        at = torch.tensor(row.mask).nonzero()[:, 0]
        total = total + functional.cross_entropy(logits[at - 1], torch.tensor(row.ids)[at], reduction="sum")
        count += len(at)
    config = sft_config(tokens_per_micro_batch=100_000)
    backend = TorchBackend(config, tiny_model(), device="cpu")
    result = train_step(backend, Objective(config.learner), demonstrations(3), config.learner, version=0)
    assert result.record.loss == pytest.approx(float(total.detach()) / count, rel=1e-6)


def test_what_cannot_be_rendered_names_file_and_line() -> None:
    long = {"messages": [said("user", "a" * 400), said("assistant", "b")]}
    with pytest.raises(RunError, match=r"line 1 cannot be trained on: it has 4\d\d tokens in one row"):
        rendered().batch(shown([turns(1), long]))
    first, second = shown([turns(1), turns(2)])
    with pytest.raises(RunError, match="line 0 arrived with another digest"):
        rendered().batch([dataclasses.replace(first, chat=second.chat)])


def test_a_run_without_demonstrations_loads_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.rendering.template.load_tokenizer", None)
    assert Rendered.of(Config()) is None


def test_the_trainer_takes_demonstrations_alone_or_beside_groups() -> None:
    for config, alone in ((sft_config(), True), (tiny_config(), False)):
        backend = TorchBackend(config, tiny_model(), device="cpu")
        trainer = Trainer(config, backend, Objective(config.learner), None, rendered())
        batch = trainer.combined(a_batch, shown(CHATS))
        assert (batch.demonstrations is None) is alone
        assert len(batch if alone else batch.demonstrations or ()) == len(CHATS)
        assert trainer.combined(a_batch, ()).demonstrations is None
