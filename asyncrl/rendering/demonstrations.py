"""A demonstration as rows of ids with a loss mask, rendered as an episode in which the policy said what it shows.

    messages    system  user      assistant  tool      assistant
    row         render_initial    answer     tail      answer          answers carry loss, the rest is context
                . . . . . . . .   1 1 1 1    . . . .   1 1 1

Where the chat template changes earlier ids (a template that forgets thinking), a row ends and the next begins with the
whole conversation, as in an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.data.base import Message
from asyncrl.data.demonstrations.chat import Chat
from asyncrl.rendering.template import Renderer


class CannotRender(Exception):
    """Why a demonstration cannot be trained on, and the remedy."""


@dataclass(slots=True)
class ShownRow:
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    """True at the ids of the assistant, which carry loss."""

    def add(self, ids: Sequence[int], *, shown: bool) -> None:
        self.ids += ids
        self.mask += [shown] * len(ids)


def rows_of(renderer: Renderer, chat: Chat, max_tokens: int | None) -> list[ShownRow]:
    """The rows of a demonstration, each with at least one id that carries loss.

    `max_tokens`: the model's positions, or None where they are not known. Raises CannotRender.
    """
    answer = getattr(renderer, "render_answer", None)
    if answer is None:
        raise CannotRender(
            f"actors.renderer gives a {type(renderer).__name__} without render_answer, which demonstrations need "
            "(asyncrl/rendering/template.py)"
        )
    try:
        rows = _rendered(renderer, chat.messages, chat.tools)
    except CannotRender:
        raise
    except Exception as error:  # a chat template may raise anything
        roles = ", ".join(dict.fromkeys(str(m["role"]) for m in chat.messages))
        raise CannotRender(
            f"the chat template refuses it ({type(error).__name__}: {str(error).strip()[:200]}); its roles are {roles}"
            ": use those of the model, or leave the row out"
        ) from error
    for row in rows:
        if max_tokens is not None and len(row.ids) > max_tokens:
            raise CannotRender(
                f"it has {len(row.ids)} tokens in one row, the model has {max_tokens} positions: shorten or split the "
                "chat, or leave it out"
            )
    return rows


def _rendered(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any]) -> list[ShownRow]:
    rows: list[ShownRow] = []
    row, rendered, last = ShownRow(), 0, 0
    for place in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        before = messages[:place]
        tail = None
        if rendered:
            # So many messages are in the row, the last of them the assistant's, with `last` ids.
            tail = renderer.render_tail(messages[:rendered], messages[rendered:place], tools, row=row.ids, sampled=last)
        if tail is None:
            row = ShownRow()
            rows.append(row)
            row.add(renderer.render_initial(before, tools), shown=False)
        else:
            row.add(tail, shown=False)
        answer = renderer.render_answer(before, messages[place], tools)
        if answer is None or not row.ids:
            raise CannotRender(
                f"the chat template does not write message {place} (assistant) behind the prompt of its turn, or does "
                "not end it with a stop token (actors.stop_token_ids), so that its tokens cannot be told apart: use a "
                "template that does, or actors.renderer"
            )
        row.add(answer, shown=True)
        rendered, last = place + 1, len(answer)
    return rows
