"""A teacher on servers of another vocabulary or template is refused by its tokenizer, before a server is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.scorer.__main__ import probe_tokens
from tests.learner.distillation.teachers import teacher_in


def config(path: Path | str) -> Config:
    teacher = {"path": str(path), "scored_by": "servers", "servers": ["http://t:1"], "over": "token"}
    return Config.model_validate({"model": {"path": "quickstart"}, "learner": {"teacher": teacher}})


def test_the_probe_is_of_the_policys_own_tokens() -> None:
    tokens = probe_tokens(config("quickstart"))
    assert len(set(tokens)) > 5
    assert len(tokens) <= 32


def test_another_vocabulary_is_named(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"a teacher of another vocabulary than model\.path: .* in the teacher"):
        probe_tokens(config(folder))


def test_another_template_is_named(tmp_path: Path) -> None:
    folder = teacher_in(tmp_path)
    (template,) = folder.glob("*.jinja")
    template.write_text(template.read_text().replace("assistant", "model", 1) + "x")
    with pytest.raises(ConfigError, match=r"a teacher of another chat template than model\.path: token"):
        probe_tokens(config(folder))


def test_a_head_of_fewer_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="whose head knows 50 words while the tokenizer has 243"):
        probe_tokens(config(teacher_in(tmp_path, vocab_size=50)))
