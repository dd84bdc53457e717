"""Roles of chat messages that no chat template knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.rendering.roles import KNOWN, template_of, unknown_role

ITS_OWN = "{%- if message.role == 'user' or message.role == 'observation' %}..."


def test_the_roles_of_openai_are_never_refused() -> None:
    for template in (None, "", ITS_OWN):
        assert unknown_role([{"role": role} for role in KNOWN], template) == ""


@pytest.mark.parametrize(
    ("role", "template", "said"),
    [
        ("human", ITS_OWN, "write user"),
        ("GPT", ITS_OWN, "write assistant"),
        ("weather", ITS_OWN, "write system, user, assistant or tool"),
        ("observation", ITS_OWN, ""),
        ("observation", "", "write system, user"),
        ("human", None, "write user"),
        ("observation", None, ""),  # a template that is not here may know it
    ],
)
def test_a_role_that_the_template_does_not_name_is_refused(role: str, template: str | None, said: str) -> None:
    problem = unknown_role([{"role": "user"}, {"role": role}], template)
    assert (said in problem) if said else problem == ""


def test_the_template_is_read_from_either_file(tmp_path: Path) -> None:
    config = Config.load(None, {"model.path": str(tmp_path)})
    assert template_of(config) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": '"observation"'}]}))
    assert unknown_role([{"role": "observation"}], template_of(config)) == ""
    (tmp_path / "chat_template.jinja").write_text(ITS_OWN)
    assert template_of(config) == ITS_OWN
    assert template_of(Config.load(None, {"model.path": str(tmp_path), "actors.renderer": "mine.py:make"})) is None
    assert template_of(Config.load(None, {"model.path": "nobody/nothing"})) is None
    assert "message.role" in (template_of(Config()) or "")
