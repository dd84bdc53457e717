"""A teacher that cannot teach is refused with one sentence that names what is wrong, before anything is trained."""

from __future__ import annotations

import doctest
import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from asyncrl.config import Config
from asyncrl.config.resuming import change, settings
from asyncrl.errors import ConfigError, RunError
from asyncrl.launch.checks.installed import check_teacher
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.build import refuse_without_teacher
from asyncrl.learner.distillation.identity import recorded, remember
from asyncrl.model import QUICKSTART, teacher_folder
from asyncrl.rendering import same_words
from tests.learner.distillation.teachers import a_trainer, taught_config, teacher_in
from tests.learner.fake_buffer import FakeBuffer
from tests.learner.test_loop import played
from tests.learner.tiny import tiny_config, tiny_model


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        TorchBackend(config, tiny_model(), device="cpu")
    return str(refused.value)


def test_no_folder_and_no_model(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refusal(taught_config(missing)).startswith(
        f"learner.teacher.path is '{missing}', and there is no such folder"
    )
    (tmp_path / "run" / "checkpoints" / "step-000007").mkdir(parents=True)
    of_run = refusal(taught_config(tmp_path / "run"))
    assert "holds no model: expected a folder with config.json" in of_run
    assert "checkpoints/step-000007" in of_run, "a run is given: its checkpoint is named"
    with pytest.raises(ConfigError, match=r"learner\.teacher\.path is '.*run', and .* holds no model"):
        check_teacher(taught_config(tmp_path / "run"))
    check_teacher(tiny_config())
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "holds no causal language model" in refusal(taught_config(tmp_path / "run"))


def test_a_checkpoint_of_a_run_is_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    assert teacher_folder("quickstart") == QUICKSTART
    teacher_in(tmp_path / "step-000003" / "hf")
    assert teacher_folder(str(tmp_path / "step-000003")) == tmp_path / "step-000003" / "hf"
    same = [TorchBackend(taught_config(path), tiny_model(), device="cpu").teacher_digest
            for path in (tmp_path / "step-000003", tmp_path / "step-000003" / "hf")]  # fmt: skip
    assert same[0] == same[1] != ""


def test_another_vocabulary(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    said = refusal(taught_config(folder))
    assert "a teacher of another vocabulary than model.path" in said
    assert f"{a!r} is {vocabulary[b]} there and {vocabulary[a]} in the teacher" in said


def test_a_head_of_fewer_words_than_the_tokenizer(tmp_path: Path) -> None:
    assert "whose head knows 50 words while the tokenizer has 243" in refusal(
        taught_config(teacher_in(tmp_path, vocab_size=50))
    )


def test_another_chat_template(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path)
    template = next(folder.glob("*.jinja"))
    text = template.read_text()
    template.write_text("{# said otherwise #}" + text)
    TorchBackend(taught_config(folder), tiny_model(), device="cpu")  # it renders the same tokens
    template.write_text(text + "!")
    said = refusal(taught_config(folder))
    assert "a teacher of another chat template than model.path: token" in said
    assert "'!' in the teacher" in said
    template.unlink()
    assert "'(no chat template)' in the teacher" in refusal(taught_config(folder))


def test_a_context_shorter_than_the_rows(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path, max_position_embeddings=100)
    said = refusal(taught_config(folder))
    assert said.startswith("env.max_tokens is 256, and the teacher in learner.teacher.path")
    assert "reads rows of at most 100 tokens: lower env.max_tokens" in said


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path)
    weights = {name: x.clone() for name, x in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"][3, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "its weight lm_head.weight holds numbers that are not finite" in refusal(taught_config(folder))


@pytest.mark.parametrize(
    ("learner", "given", "buffer", "said"),
    [
        ({}, {"path": "", "coef": 2.0}, {}, "learner.teacher.coef is set and learner.teacher.path is empty"),
        ({}, {"into": "advantage"}, {}, "Set learner.teacher.over token, or learner.teacher.into loss"),
        ({}, {"into": "advantage", "over": "top_k"}, {}, "learner.teacher.over top_k"),
        ({}, {"coef": 0.0}, {}, "learner.teacher.coef and learner.teacher.reward_weight are both 0"),
        ({}, {}, {"filters": ("zero_variance",)}, "buffer.filters drops groups of equal rewards"),
        ({}, {}, {"on_starved": "end"}, "buffer.on_starved is end"),
        ({"critic": "shared", "advantage": "gae"}, {}, {}, "learner.critic is shared and learner.teacher.reward"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work(
    learner: dict[str, Any], given: dict[str, Any], buffer: dict[str, Any], said: str
) -> None:
    teacher = {"path": "quickstart"} | given
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        Config.model_validate({"learner": learner | {"teacher": teacher}, "buffer": buffer})


def test_truncated_sampling_has_other_logprobs_than_the_teachers() -> None:
    actors = {"top_p": 0.9}
    Config.model_validate({"actors": actors, "learner": {"teacher": {"path": "quickstart"}}})
    with pytest.raises(ValueError, match=r"learner\.teacher\.over is token while actors\.top_p is 0\.9"):
        Config.model_validate({"actors": actors, "learner": {"teacher": {"path": "quickstart", "over": "token"}}})


def test_a_group_of_one_learns_from_a_teacher_and_not_from_rewards() -> None:
    Config.model_validate({"learner": {"group_size": 1, "teacher": {"path": "quickstart"}}})
    with pytest.raises(ValueError, match=r"learner\.group_size is 1"):
        Config.model_validate({"learner": {"group_size": 1}})
    watched = {"path": "quickstart", "coef": 0.0, "reward_weight": 1.0}
    with pytest.raises(ValueError, match=r"learner\.group_size is 1"):
        Config.model_validate({"learner": {"group_size": 1, "teacher": watched}})


def test_what_resuming_makes_of_its_fields() -> None:
    assert change("learner.teacher.path") == "refused"
    assert change("learner.teacher.coef") == "branch"
    assert not any("teacher" in field for field in settings(tiny_config())), "a run without one is as it was"
    assert settings(taught_config("quickstart", coef=2.0))["learner.teacher.coef"] == 2.0


def test_a_backend_of_ones_own_without_teachers() -> None:
    class Fake:
        pass

    with pytest.raises(ConfigError, match="has no teacher"):
        refuse_without_teacher(taught_config("quickstart"), Fake())  # type: ignore[arg-type]
    refuse_without_teacher(tiny_config(), Fake())  # type: ignore[arg-type]


def test_the_runs_teacher_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "teacher.json"
    remember(file, "", "")
    assert not file.exists()
    assert recorded(file) == ""
    remember(file, "a", "1" * 32)
    remember(file, "elsewhere", "1" * 32)
    assert recorded(file) == "1" * 32
    with pytest.raises(
        RunError, match=rf"\(a\) has the digest 2{{12}}, and the run learned from one with 1{{12}}, .*{file}"
    ):
        remember(file, "a", "2" * 32)
    file.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        recorded(file)


def test_resuming_with_another_teacher_is_refused(tmp_path: Path) -> None:
    config = taught_config(teacher_in(tmp_path / "teacher"), {"steps": 4, "checkpoint_every": 2})
    buffer = FakeBuffer(steps=4)
    played(tmp_path, buffer, config=config)
    played(tmp_path, buffer, config=config, resume=True)
    teacher_in(tmp_path / "teacher", seed=6)
    with pytest.raises(RunError, match=r"learned from one with \w{12}, by checkpoint .*step-000004"):
        played(tmp_path, buffer, config=config, resume=True)


@pytest.mark.system
def test_its_memory_is_counted(tmp_path: Path) -> None:
    from asyncrl.learner.budget.memory import memory_of_learner, model_config

    plain, taught = tiny_config(), taught_config(teacher_in(tmp_path))
    counted = [memory_of_learner(config, model_config(config)).parts for config in (plain, taught)]
    backend = a_trainer(taught).backend
    size = sum(p.numel() for p in backend._teacher._scorer.parameters())
    assert "teacher" not in counted[0]
    assert counted[1]["teacher"] == 4 * size
    assert counted[1]["activations"] > counted[0]["activations"], "the logits of both"


def test_docstrings() -> None:
    assert doctest.testmod(same_words).failed == 0
