"""Checks the roles of chat messages before a chat template gets them: one that it does not know is left out of the
prompt by some templates, and written as it stands by others, where the model has never seen it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.model import local_path, resolve_path

KNOWN = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of OpenAI's chat messages."""
MEANT = {
    "human": "user", "question": "user", "prompt": "user", "gpt": "assistant", "ai": "assistant", "bot": "assistant",
    "chatbot": "assistant", "chatgpt": "assistant", "model": "assistant", "answer": "assistant",
}  # fmt: skip
"""What other roles stand for, such as those of ShareGPT's files."""


def unknown_role(messages: Iterable[Mapping[str, Any]], template: str | None) -> str:
    """Why one of the messages cannot be rendered rightly; empty if all can. `template`: the text of the chat template,
    which may know more roles; None: it is not to be had, and only a role of MEANT is refused. Pure.

    >>> unknown_role([{"role": "human"}], "{{ messages }}")
    "a message has the role 'human', which the model's chat template does not know: write user"
    >>> unknown_role([{"role": "observation"}], "{% if message.role == 'observation' %}")
    ''
    """
    for role in dict.fromkeys(str(message["role"]) for message in messages):
        if role in KNOWN or any(f"{quote}{role}{quote}" in (template or "") for quote in "'\""):
            continue
        if template is not None or role.lower() in MEANT:
            meant = MEANT.get(role.lower(), "system, user, assistant or tool")
            return f"a message has the role {role!r}, which the model's chat template does not know: write {meant}"
    return ""


def template_of(config: Config) -> str | None:
    """The text of the model's chat template, where its files are here and `actors.renderer` uses it; else None."""
    if config.actors.renderer != "template":
        return None
    folder = resolve_path(config.model) if config.model.path == "quickstart" else local_path(config.model)
    if folder is None:
        return None
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    return _in_config(folder / "tokenizer_config.json")


def _in_config(file: Path) -> str | None:
    """The template in a tokenizer's configuration: a text, or a list of them by name."""
    try:
        found = json.loads(file.read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):  # the roles that load the tokenizer say what is wrong with the file
        return None
    return None if found is None else json.dumps(found).replace('\\"', '"')
