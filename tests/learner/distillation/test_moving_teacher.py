"""A teacher that is the policy itself, or an average of it: what it reads, what it weighs, and how it moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.comparison import ROWS, compared
from asyncrl.learner.backends.hf.fsdp2 import Fsdp2Backend
from asyncrl.learner.backends.hf.moving import FILE, MovingTeacher
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.hinted import with_hints
from asyncrl.learner.backends.protocol import Hints, Packed, Scores
from asyncrl.learner.batch import Batch, hinted
from asyncrl.learner.build import refuse_without_teacher
from asyncrl.learner.distillation.divergence import Comparison, Divergence, Kind
from asyncrl.learner.hints import HintRows, closing_of
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.reporting.metrics import step_metrics
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.trainer import Trainer
from asyncrl.model import load_tokenizer
from asyncrl.rendering.build import build_renderer
from asyncrl.tracking.series import check
from asyncrl.trajectory import CONTEXT, Row, Trajectory
from tests.learner.distillation.slow_divergences import divergence, gradient
from tests.learner.distillation.teachers import tokenizer_in
from tests.learner.kept_ranks import on_kept_ranks
from tests.learner.step.test_train_step import a_batch, episodes
from tests.learner.tiny import tiny_config, tiny_model

HINT = [7, 3, 11]


def hint(t: Trajectory) -> list[tuple[list[int], int]]:
    """Every second trajectory is shown something, behind the first token of each row."""
    return [(HINT if t.id.index % 2 else [], 1) for _ in t.rows]


def a_hinted_batch(seed: int = 0) -> Batch:
    return hinted(a_batch(seed), episodes(seed), range(4), hint)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the policy that `tiny_model` gives."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return str(tokenizer_in(folder))


def moving(model: str, learner: dict[str, Any] | None = None, **given: Any) -> Config:
    config = tiny_config(**({"lr": 1e-2} | (learner or {})), teacher={"path": "policy", **given})
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


def a_trainer(config: Config) -> Trainer:
    return Trainer(config, TorchBackend(config, device="cpu"), Objective(config.learner))


def state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in trainer.backend._scorer.named_parameters()}


def average(trainer: Trainer) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in trainer.backend._moving.state_dict().items()}


class Sums(nn.Module):
    """A policy whose logits before a token are the sum of a vector of each token before it, times its place: float64,
    and plain enough to be done by hand. Its head is the identity."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.vectors = torch.randn(words, words, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / 8
        self.model = self
        self.head = nn.Linear(words, words, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(words))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, ids: list[int]) -> list[float]:
        return [
            sum(float(self.vectors[token, word]) * place for place, token in enumerate(ids, 1))
            for word in range(len(self.vectors))
        ]

    def forward(self, part: Packed) -> Scores:
        found, at = [], 0
        for n in part.lengths:
            ids = part.token_ids[at : at + n].tolist()
            found += [self.logits(ids[:t]) for t in range(n) if part.mask[at + t]]
            at += n
        nothing = torch.zeros(len(part.token_ids))
        return Scores(nothing, nothing, torch.tensor(found, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_the_divergence_and_its_gradient_by_hand(kind: Kind) -> None:
    """Of every sampled token: the policy behind its own prompt, against the policy behind the prompt with the hint."""
    rows, masks = [[1, 4, 2, 5, 0], [3, 3, 1]], [[0, 0, 1, 1, 0], [0, 1, 1]]
    hints, places = [HINT, []], [1, 0]
    words = 12
    part = Packed(
        torch.tensor([*rows[0], *rows[1]]), torch.tensor([*masks[0], *masks[1]]).bool(), (5, 3),
        hints=Hints(torch.tensor(HINT), (3, 0), (1, 0)),
    )  # fmt: skip
    policy = Sums(words)
    of_teacher = MovingTeacher(policy, None, 1.0).states(part)
    expected, slopes = [], []
    for row, mask, shown, place in zip(rows, masks, hints, places, strict=True):
        for t in (t for t, sampled in enumerate(mask) if sampled):
            mine, theirs = policy.logits(row[:t]), policy.logits([*row[:place], *shown, *row[place:t]])
            expected.append(divergence(mine, theirs, kind))
            slopes.append(gradient(lambda x, q=theirs: divergence(x, q, kind), mine))
    hidden = policy(part).hidden.requires_grad_()
    found = compared(
        hidden, torch.eye(words, dtype=torch.float64), part.token_ids[part.mask], of_teacher,
        Comparison(Divergence(kind)),
    )[ROWS.index("divergence")]  # fmt: skip
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert min(expected[:2]) > 1e-3
    assert expected[2:] == pytest.approx([0.0, 0.0], abs=1e-12), "the second row is shown nothing"
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == pytest.approx([x for slope in slopes for x in slope], abs=1e-9)


def test_rows_that_are_shown_nothing_have_no_term(model: str) -> None:
    trainer, batch = a_trainer(moving(model, update_rate=0.1)), a_hinted_batch()
    trainer.train(batch, 0)
    record = trainer.train(a_hinted_batch(1), 1).record
    batch = a_hinted_batch(1)
    assert batch.hints is not None
    assert record.teacher is not None
    seen = record.teacher[ROWS.index("divergence")]
    shown = batch.mask & batch.compared
    assert 0 < int(shown.sum()) < int(batch.mask.sum())
    assert float(seen[batch.mask & ~shown].max()) > 0, "the average differs there too, and does not count"
    expected = float(seen[shown].sum()) / int(batch.mask.sum())
    assert record.teacher_loss == pytest.approx(expected, rel=1e-5)
    metrics = step_metrics(trainer.objective, batch, episodes(1), trainer.train(batch, 2), version=2, success="reward")
    check(metrics)
    assert metrics["teacher/hint_tokens"] == len(HINT)
    assert 0 < metrics["teacher/hinted"] < 1


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("rate", [1.0, 0.25, 0.0])
def test_how_it_moves(model: str, rate: float, minibatches: int) -> None:
    """After each step (1 - rate) average + rate policy; within a step it stays, whatever the number of updates."""
    trainer = a_trainer(moving(model, {"minibatches": minibatches}, update_rate=rate))
    teacher = trainer.backend._moving
    expected = {name: x.double() for name, x in state(trainer).items()}
    for v in range(3):
        before, seen = state(trainer), []
        states = teacher.states
        teacher.states = lambda part, states=states, seen=seen: (seen.append(part), states(part))[1]
        assert trainer.train(a_hinted_batch(v), v).outcome == "applied"
        teacher.states = states
        assert seen, "it was asked"
        now = state(trainer)
        assert any(not torch.equal(before[name], now[name]) for name in now)
        expected = {name: (1 - rate) * x + rate * now[name].double() for name, x in expected.items()}
        held = now if rate == 1 and minibatches == 1 else average(trainer)
        for name, x in expected.items():
            torch.testing.assert_close(held[name].double(), x, atol=1e-6, rtol=1e-6)


def test_the_teacher_of_the_second_update_is_that_of_the_first(model: str) -> None:
    trainer, found = a_trainer(moving(model, {"minibatches": 2})), []
    apply = trainer.backend.apply
    trainer.backend.apply = lambda lr: (found.append(average(trainer)), apply(lr), found.append(average(trainer)))
    trainer.train(a_hinted_batch(), 0)
    assert len(found) == 4
    assert all(torch.equal(found[0][name], each[name]) for each in found for name in each)


@pytest.mark.parametrize("given", [{"update_rate": 0.25}, {"update_rate": 0.0}, {}], ids=["average", "first", "policy"])
def test_a_resumed_run_has_the_same_bits(model: str, tmp_path: Path, given: dict[str, Any]) -> None:
    config = moving(model, {"minibatches": 2}, **given)
    whole, part = a_trainer(config), a_trainer(config)
    for v in range(4):
        whole.train(a_hinted_batch(v), v)
    for v in range(2):
        part.train(a_hinted_batch(v), v)
    part.save(tmp_path)
    assert (tmp_path / FILE).is_file() == (given.get("update_rate", 1) == 0.25)
    again = a_trainer(config)
    again.load(tmp_path)
    for v in range(2, 4):
        again.train(a_hinted_batch(v), v)
    for of in (state, average):
        one, other = of(whole), of(again)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_without_the_average_is_refused(model: str, tmp_path: Path) -> None:
    config = moving(model, update_rate=0.25)
    a_trainer(config).save(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(RunError, match=rf"has no {FILE}.*learner\.teacher\.update_rate"):
        a_trainer(config).load(tmp_path)


@pytest.mark.parametrize("given", [{}, {"update_rate": 0.25}], ids=["policy", "average"])
def test_two_ranks_equal_one(model: str, given: dict[str, Any]) -> None:
    one, two = on_kept_ranks(1, shard, model, given)[0], on_kept_ranks(2, shard, model, given)[0]
    alone = a_trainer(moving(model, {"tokens_per_micro_batch": 60}, **given))
    for v in range(2):
        alone.train(a_hinted_batch(v), v)
    plain = dict(alone.backend.weights())
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-3)
    for name, x in plain.items():
        torch.testing.assert_close(one[name], x, atol=1e-4, rtol=1e-3)


def shard(model: str, given: dict[str, Any]) -> dict[str, Tensor]:
    config = moving(model, {"tokens_per_micro_batch": 60}, **given)
    backend = Fsdp2Backend(config, device="cpu")
    found: dict[str, Tensor] = {}
    for v in range(2):
        record = train_step(backend, Objective(config.learner), a_hinted_batch(v), config.learner, version=v).record
        assert record.teacher is not None
        found[f"seen {v}"] = record.teacher
    return found | dict(backend.weights())


def test_a_sharded_average_is_resumed(model: str, tmp_path: Path) -> None:
    assert on_kept_ranks(2, sharded_resume, model, str(tmp_path)) == [True, True]


def sharded_resume(model: str, folder: str) -> bool:
    config = moving(model, update_rate=0.25)

    def made() -> Trainer:
        return Trainer(config, Fsdp2Backend(config, device="cpu"), Objective(config.learner))

    whole = made()
    whole.train(a_hinted_batch(0), 0)
    whole.save(Path(folder))
    again = made()
    again.load(Path(folder))
    for trainer in (whole, again):
        trainer.train(a_hinted_batch(1), 1)
    one, other = ({n: x.full_tensor() for n, x in t.backend._moving.state_dict().items()} for t in (whole, again))
    return all(torch.equal(one[name], other[name]) for name in one)


def asked(config: Config, prompt: str, answer: str, hint: str, *, index: int = 0, system: str = "") -> Trajectory:
    """An episode with one row: the prompt as actors render it, and the answer's tokens."""
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    ids = build_renderer(config).render_initial(messages, [])
    sampled = load_tokenizer(config.model).encode(answer, add_special_tokens=False)
    tokens = np.array([*ids, *sampled], np.int32)
    mask = np.arange(len(tokens)) >= len(ids)
    row = Row(tokens, mask, np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, CONTEXT).astype(np.int32))
    return replace(episodes()[index], rows=(row,), hint=hint)


def test_the_hint_stands_at_the_end_of_the_users_message() -> None:
    config = Config.model_validate({
        "learner": {"teacher": {"path": "policy", "shown_as": " It is {shown}!", "shown_tokens": 20}},
        "env": {"max_tokens": 128}, "actors": {"max_new_tokens": 64},
    })  # fmt: skip
    rows_of, renderer = HintRows.of(config), build_renderer(config)
    assert rows_of is not None
    t = asked(config, "What is fox + owl?", "41", "forty", system="Be brief.")
    ((ids, place),) = rows_of(t)
    row = t.rows[0]
    part = Packed(
        torch.tensor(row.token_ids), torch.tensor(row.mask), (len(row),),
        hints=Hints(torch.tensor(ids), (len(ids),), (place,)),
    )  # fmt: skip
    read = with_hints(part)
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is fox + owl? It is forty!"}
    ]  # fmt: skip
    assert renderer.decode(read.token_ids.tolist()) == renderer.decode(renderer.render_initial(messages, [])) + "41"
    assert renderer.decode(read.token_ids[read.mask].tolist()) == "41"
    assert rows_of(asked(config, "What?", "41", "")) == [((), 0)]
    long = rows_of(asked(config, "What?", "41", "ant bat " * 40))[0][0]
    assert len(long) == rows_of.longest, "of a longer one the first tokens are shown"


def test_later_rows_have_it_where_the_first_has_it() -> None:
    config = Config.model_validate({
        "learner": {"teacher": {"path": "policy", "shown_as": "{shown}", "shown_tokens": 20}},
        "env": {"max_tokens": 128}, "actors": {"max_new_tokens": 64},
    })  # fmt: skip
    rows_of = HintRows.of(config)
    assert rows_of is not None
    t = asked(config, "What is fox?", "ant", "owl")
    first = t.rows[0]
    later = Row(
        np.concatenate([first.token_ids, first.token_ids[-1:]]), np.append(first.mask & False, True),
        np.append(first.logprobs * 0, np.float32(-1)), np.append(np.full(len(first), CONTEXT, np.int32), np.int32(0)),
    )  # fmt: skip
    (ids, place), (_, of_later) = rows_of(replace(t, rows=(first, later)))
    assert place == of_later == int(first.mask.argmax()) - len(closing_of(build_renderer(config)))
    assert len(ids) > 0
    other = replace(later, token_ids=later.token_ids[::-1].copy())
    with pytest.raises(RunError, match=r"there is no place for what learner\.teacher\.shown shows"):
        rows_of(replace(t, rows=(first, other)))


def test_a_hint_for_which_the_model_has_no_room_is_refused_at_the_start() -> None:
    config = Config.model_validate({"learner": {"teacher": {"path": "policy"}}, "env": {"max_tokens": 256}})
    with pytest.raises(
        ConfigError, match=r"shown_tokens is 1024 and env\.max_tokens 256: .* 256 positions\. Lower one"
    ):
        HintRows.of(config)


def test_a_backend_without_a_teacher_that_moves_is_refused() -> None:
    class Own:
        teacher_digest = "x"

    with pytest.raises(ConfigError, match="lacks move_teacher, which is described under `MovesTeacher`"):
        refuse_without_teacher(Config.model_validate({"learner": {"teacher": {"path": "policy"}}}), Own())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("teacher", "learner", "why"),
    [
        ({"scored_by": "servers", "servers": ["http://t"], "over": "top_k"}, {}, r"policy and .*scored_by servers"),
        ({"shown": "nothing"}, {}, r"update_rate 1 and shown nothing: teacher and policy are the same"),
        ({"shown_as": "see"}, {}, r"shown_as is 'see', expected a text with \{shown\} in it once"),
        ({"update_rate": 0.5}, {"lora": {"r": 4}}, r"update_rate is 0\.5 and .*lora\.r 4.*Set update_rate 1 or 0"),
        ({"path": "quickstart", "update_rate": 0.5}, {}, r"update_rate is 0\.5 and .*path 'quickstart'"),
        ({"path": "quickstart", "shown": "feedback"}, {}, r"'feedback' and .*Set learner\.teacher\.path policy"),
        ({"update_rate": 1.5}, {}, r"update_rate"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_remedy(
    teacher: dict[str, Any], learner: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){why}"):
        Config.model_validate({"learner": {"teacher": {"path": "policy"} | teacher, **learner}})
