"""A teacher under Megatron-core: what torch finds in one process, however the models are shared out."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.comparison import TeacherStates, compared
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.backends.protocol import TeacherWords
from asyncrl.learner.backends.recorded import compared_with_recorded
from asyncrl.learner.batch import Batch
from asyncrl.learner.distillation.divergence import Comparison, Divergence
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.step.train_step import train_step
from asyncrl.learner.trainer import Trainer
from tests.learner.backends.backend_cases import close
from tests.learner.distillation.teachers import taught_config, teacher_in
from tests.learner.distillation.test_moving_teacher import a_hinted_batch, moving
from tests.learner.distillation.test_recorded import as_recorded
from tests.learner.ranks import on_ranks
from tests.learner.step.test_train_step import a_batch
from tests.learner.tiny import tiny_model

SHARED = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {"distributed_optimizer": True}),
    "pp2-tp2": (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
}
SLOW = pytest.mark.slow
NAMES = ["tp2", "pp2", pytest.param("one", marks=SLOW), pytest.param("dp2", marks=SLOW)]
NAMES.append(pytest.param("pp2-tp2", marks=SLOW))
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"over": "token"},
    {"over": "token", "into": "advantage", "reward_weight": 0.5},
    {"divergence": "forward_kl"},
    {"divergence": "jsd", "jsd_beta": 0.3},
    {"over": "top_k", "k": 4},
    {"over": "top_k", "k": 25, "top_k_of": "student"},
)
"""25 words are more than one of two ranks has."""
WORDS = 37


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    importlib.import_module("asyncrl.learner.backends.megatron.backend")  # here once, and not in every rank


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another family, width and vocabulary than the policy; as many layers as there are stages."""
    return teacher_in(tmp_path_factory.mktemp("teacher"), num_hidden_layers=2, hidden_size=48)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.learner.distillation.teachers import tokenizer_in

    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return str(tokenizer_in(folder))


def shared_out(config: Config, options: dict[str, Any], dtype: str = "float32") -> Config:
    learner = config.learner.model_dump() | {"backend": "megatron", "backend_options": options}
    model = config.model.model_copy(update={"dtype": dtype})
    return Config.model_validate(config.model_dump() | {"learner": learner, "model": model.model_dump()})


def build(config: Config) -> Any:
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    kind = MegatronBackend if config.learner.backend == "megatron" else TorchBackend
    # A frozen teacher's tests take the policy as it is drawn, those of a moving one load the run's first model.
    return kind(config, tiny_model() if config.model.path == "quickstart" else None, device="cpu")


def gradients_of(backend: Any) -> dict[str, Tensor]:
    if isinstance(backend, TorchBackend):
        return {n: p.grad.clone() for n, p in backend._model.named_parameters()}
    return {n: g.clone() for n, g in backend.gradients()}


def stepped(config: Config, batches: list[Batch]) -> dict[str, Any]:
    """What is seen of the teacher in each step, the losses, the first step's gradients and the weights at the end."""
    from asyncrl.learner.step.companions import move_followers

    backend, found = build(config), dict[str, Any](seen=[], losses=[])
    apply = backend.apply

    def kept(lr: float) -> None:
        found.setdefault("gradients", gradients_of(backend))
        apply(lr)

    backend.apply = kept
    for v, batch in enumerate(batches):
        record = train_step(backend, Objective(config.learner), batch, config.learner, version=v).record
        move_followers(backend, config.learner, v + 1)
        assert record.teacher is not None
        found["seen"].append(record.teacher)
        found["losses"] += [record.loss, record.teacher_loss]
    found["weights"] = {n: t.clone() for n, t in backend.weights()}
    found["digest"] = backend.teacher_digest
    return found


def each_stepped(configs: list[Config], batches: list[Batch]) -> list[dict[str, Any]]:
    return [stepped(config, batches) for config in configs]


def same(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert found["digest"] == alone["digest"]
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-5, abs=1e-6)
    for mine, theirs in zip(found["seen"], alone["seen"], strict=True):
        assert float(theirs[1].abs().max()) > 1, "a teacher spoke"
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)
    # Of the first step, in which the weights are the same.
    torch.testing.assert_close(found["seen"][0], alone["seen"][0], atol=1e-5, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in alone["gradients"].values())
    close(*({n: g / scale for n, g in x["gradients"].items()} for x in (found, alone)), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_teacher_is_that_of_torch(tmp_path: Path, teacher: Path, name: str) -> None:
    size, options = SHARED[name]
    learner = {"tokens_per_micro_batch": 60, "max_grad_norm": 1e9}
    configs = [taught_config(teacher, learner, **given) for given in OBJECTIVES]
    batches = [a_batch(v) for v in range(2)]
    ranks = on_ranks(size, tmp_path, each_stepped, [shared_out(c, options) for c in configs], batches)
    for found, config in zip(ranks[0], configs, strict=True):
        alone = stepped(config, batches)
        same(found, alone)
        close(found["weights"], alone["weights"], config.learner.lr / 4)
    for other in ranks[1:]:
        assert [x["losses"] for x in other] == [x["losses"] for x in ranks[0]]
        for mine, theirs in zip(other, ranks[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine["seen"], theirs["seen"], strict=True))


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("k", [0, 4])
def test_a_teacher_on_servers_is_that_of_torch(tmp_path: Path, teacher: Path, name: str, k: int) -> None:
    size, options = SHARED[name]
    given = {"over": "top_k", "k": k} if k else {"over": "token"}
    config = taught_config(
        teacher, {"tokens_per_micro_batch": 60}, scored_by="servers", servers=("http://t:1",), **given
    )
    batches = [as_recorded(teacher, a_batch(v), k) for v in range(2)]
    found = on_ranks(size, tmp_path, stepped, shared_out(config, options), batches)[0]
    alone = stepped(config, batches)
    assert found["digest"] == alone["digest"] == "", "no model of the teacher is loaded"
    same(found, alone)


MOVES = ({}, {"minibatches": 2}, {"update_rate": 0.25}, {"update_rate": 0.0})


@pytest.mark.parametrize("name", NAMES)
def test_a_teacher_that_moves_is_that_of_torch(tmp_path: Path, policy: str, name: str) -> None:
    size, options = SHARED[name]
    configs = [
        moving(
            policy,
            {"lr": 1e-3, "tokens_per_micro_batch": 60, "minibatches": given.get("minibatches", 1)},
            **{key: value for key, value in given.items() if key != "minibatches"},
        )
        for given in MOVES
    ]
    batches = [a_hinted_batch(v) for v in range(3)]
    ranks = on_ranks(size, tmp_path, each_stepped, [shared_out(c, options) for c in configs], batches)[0]
    seen = []
    for found, config in zip(ranks, configs, strict=True):
        alone = stepped(config, batches)
        same(found, alone)
        seen.append(alone["seen"][-1])
    assert all(float((a - b).abs().max()) > 1e-2 for a, b in itertools.pairwise(seen)), "they move differently"


def resumed(config: Config, folder: Path) -> tuple[bool, bool, str]:
    """Whether a run that is resumed after two steps has the same bits after four, in the policy and in what it sees of
    the teacher; and what a checkpoint without an average is refused with."""
    trainers = []

    def made() -> Trainer:
        trainers.append(Trainer(config, build(config), Objective(config.learner)))
        return trainers[-1]

    whole, part = made(), made()
    for trainer, steps in ((whole, 4), (part, 2)):
        last = [trainer.train(a_hinted_batch(v), v).record.teacher for v in range(steps)][-1]
        if trainer is whole:
            expected = last
    part.save(folder)
    if dist.is_initialized():
        dist.barrier()
    again = made()
    again.load(folder)
    seen = [again.train(a_hinted_batch(v), v).record.teacher for v in (2, 3)][-1]
    assert expected is not None
    assert seen is not None
    one, other = (dict(t.backend.weights()) for t in (whole, again))
    same_weights = all(torch.equal(one[name], other[name]) for name in one)
    learner = config.learner.model_dump()
    learner["teacher"] |= {"update_rate": 0.5}
    another = Config.model_validate(config.model_dump() | {"learner": learner})
    said = ""
    if config.learner.teacher.update_rate in (0, 1):
        with pytest.raises(RunError) as caught:
            Trainer(another, build(another), Objective(another.learner)).load(folder)
        said = str(caught.value)
    return same_weights, torch.equal(expected, seen), said


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tp2", {"update_rate": 0.25}),
        ("pp2", {}),
        pytest.param("pp2", {"update_rate": 0.25}, marks=SLOW),
        pytest.param("dp2", {"update_rate": 0.25}, marks=SLOW),
        pytest.param("tp2", {"update_rate": 0.0}, marks=SLOW),
    ],
)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, policy: str, name: str, given: dict[str, Any]) -> None:
    size, options = SHARED[name]
    config = shared_out(moving(policy, {"minibatches": 2}, **given), options)
    for same_weights, same_teacher, said in on_ranks(size, tmp_path / "meet", resumed, config, tmp_path / "saved"):
        assert same_weights
        assert same_teacher
        if given.get("update_rate") != 0.25:
            assert "from which the teacher's average (learner.teacher.update_rate) would continue" in said


def small_moves(config: Config, steps: int) -> float:
    """The least way that a weight of the average has gone."""
    backend = build(config)
    first = {n: x.clone() for n, x in backend._moving.average.items()}
    for v in range(steps):
        train_step(backend, Objective(config.learner), a_hinted_batch(v), config.learner, version=v)
        backend.move_teacher()
    moved = [float((x - first[n]).norm()) for n, x in backend._moving.average.items()]
    assert all(x.dtype == torch.float32 for x in backend._moving.average.values())
    assert all(x.dtype == torch.bfloat16 for x in backend._moving.scorer.decoder.parameters())
    return min(moved)


def test_an_average_of_halves_is_whole(tmp_path: Path, policy: str) -> None:
    """It takes steps of 1e-5, which bfloat16 would round away."""
    config = shared_out(moving(policy, {"lr": 1e-3}, update_rate=0.01), {"tensor_parallel": 2}, "bfloat16")
    assert min(on_ranks(2, tmp_path, small_moves, config, 2)) > 0


def refused(configs: list[Config]) -> list[str]:
    found = []
    for config in configs:
        with pytest.raises(ConfigError) as caught:
            build(config)
        found.append(str(caught.value))
    return found


def test_a_teacher_that_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    flat = teacher_in(tmp_path / "flat")
    odd = teacher_in(tmp_path / "odd", num_key_value_heads=1)
    scaled = teacher_in(
        tmp_path / "scaled",
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    )
    configs = [
        shared_out(taught_config(flat), {"pipeline_parallel": 2}),
        shared_out(taught_config(scaled), {"pipeline_parallel": 2}),
    ]
    few, rope = on_ranks(2, tmp_path / "a", refused, configs)[0]
    assert "pipeline_parallel is 2 and the model in learner.teacher.path has 1 layers" in few
    assert rope.startswith(
        "learner.teacher.path has scaled rotary positions (linear): learner.backend megatron does not"
    )
    (heads,) = on_ranks(2, tmp_path / "b", refused, [shared_out(taught_config(odd), {"tensor_parallel": 2})])[0]
    assert "does not divide num_key_value_heads = 1 of the model in learner.teacher.path" in heads


def drawn(words: int, of_teacher: int) -> tuple[Tensor, Tensor, Tensor, TeacherStates]:
    g = torch.Generator().manual_seed(words + of_teacher)
    hidden, weight = (torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (21, words))
    states = [torch.randn(n, 4, generator=g, dtype=torch.float64) for n in (21, of_teacher)]
    return hidden, weight, torch.randint(0, words, (21,), generator=g), TeacherStates(*states)


def said(states: TeacherStates, targets: Tensor) -> TeacherWords:
    log_q = (states.hidden @ states.weight.t()).log_softmax(1)
    top = log_q.topk(4, 1)
    targets = targets.clamp(max=log_q.shape[1] - 1)
    return TeacherWords(top.indices.int(), top.values, log_q.gather(1, targets[:, None])[:, 0])


HOW = [
    Comparison(Divergence(kind, 0.3), k, words_of)  # type: ignore[arg-type]
    for kind in ("reverse_kl", "forward_kl", "jsd")
    for k, words_of in ((0, "teacher"), (3, "teacher"), (9, "student"))
]


def compared_in(words: int, of_teacher: int, size: int) -> list[Tensor]:
    """Rows and gradients: of `size` 1 by the whole vocabulary, else by this rank's words."""
    from asyncrl.learner.backends.megatron.vocabulary import Split

    hidden, weight, targets, states = drawn(words, of_teacher)
    both, policys = None, None
    if size > 1:
        rows, rank = -(-words // size), dist.get_rank()
        weight = weight[rank * rows : (rank + 1) * rows]
        aligned = TeacherStates(states.hidden, states.weight[rank * rows : (rank + 1) * rows])
        both = Split(min(words, of_teacher), rank * rows, len(weight), dist.group.WORLD)
        policys = Split(words, rank * rows, len(weight), dist.group.WORLD)
    found: list[Tensor] = []
    for how in HOW:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        rows_of = compared(*leaves, targets, aligned if size > 1 else states, how, temperature=0.7, words=both, chunk=8)
        recorded = compared_with_recorded(*leaves, said(states, targets), how.divergence, words=policys, chunk=8)
        slope = torch.linspace(-1, 2, 21, dtype=torch.float64)
        for x in (rows_of, recorded):
            found += [x.detach(), *torch.autograd.grad((x[0] * slope).sum(), leaves)]
    return found


@pytest.mark.parametrize(("words", "of_teacher"), [(WORDS, WORDS), (WORDS, 44), (WORDS, 11)])
def test_a_shared_vocabulary_is_compared_as_the_whole(tmp_path: Path, words: int, of_teacher: int) -> None:
    """In float64; of a teacher of 11 words, two of three ranks have none."""
    whole = compared_in(words, of_teacher, 1)
    ranks = on_ranks(3, tmp_path, compared_in, words, of_teacher, 3)
    for n, expected in enumerate(whole):
        found = [rank[n] for rank in ranks]
        mine = [torch.cat(found)] if n % 3 == 2 else found  # the gradient of the head is each rank's share of it
        for x in mine:
            torch.testing.assert_close(x, expected, atol=1e-12, rtol=1e-10)
