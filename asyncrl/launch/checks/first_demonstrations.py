"""Renders some of the demonstrations before anything starts: the first ones, the longest ones, and one of each sequence
of roles. What they show would otherwise end the run at the batch that takes such a row."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.data.demonstrations import Demonstrations, chat, open_demonstrations
from asyncrl.errors import ConfigError
from asyncrl.model import positions
from asyncrl.rendering.build import build_renderer
from asyncrl.rendering.demonstrations import CannotRender, rows_of
from asyncrl.rendering.roles import template_of, unknown_role

FIRST, LONGEST, KINDS = 32, 16, 32
"""How many of each are rendered."""
LOOKED_AT = 20_000
"""Rows whose length and roles are looked at."""


def check_demonstrations(config: Config) -> None:
    """Raises ConfigError naming file, line and remedy."""
    data = open_demonstrations(config)
    if data is None:
        return
    renderer, most, template = build_renderer(config), positions(config.model), template_of(config)
    for row in chosen(data):
        shown = chat.decoded(data.chats.chat(row))
        problem = unknown_role(shown.messages, template)
        try:
            rows_of(renderer, shown, most)
        except CannotRender as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"data.demonstrations: {data.chats.where(row)} cannot be trained on: {problem}.")


def chosen(data: Demonstrations) -> list[int]:
    """The rows to be rendered, ascending."""
    lengths: list[tuple[int, int]] = []
    kinds: dict[tuple[str, ...], int] = {}
    for row in range(min(data.size, LOOKED_AT)):
        text = data.chats.chat(row)
        lengths.append((-len(text), row))
        if len(kinds) < KINDS:
            kinds.setdefault(tuple(str(message["role"]) for message in chat.decoded(text).messages), row)
    longest = [row for _, row in sorted(lengths)[:LONGEST]]
    return sorted({*range(min(FIRST, data.size)), *longest, *kinds.values()})
