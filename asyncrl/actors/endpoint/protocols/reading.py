"""Reads the parts of a request whose form is checked before it is translated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from asyncrl.actors.endpoint.content import UnreadableContent, text_of
from asyncrl.actors.endpoint.protocols.protocol import Json
from asyncrl.actors.endpoint.requests import BadRequest, ChatBody, unreadable


def json_object(raw: bytes) -> Json:
    """The JSON object in a body. Raises BadRequest."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def objects(value: Any, name: str) -> list[Json]:
    """`value`, the field `name`, as a list of objects; empty if it is absent. Raises BadRequest."""
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise BadRequest(f"{name} is {value!r:.100}; expected a list of objects", param=name)
    return listed


def refuse(sent: Json, fields: Iterable[str]) -> None:
    """Raises BadRequest if one of `fields`, which need what this endpoint does not have, is set."""
    for name in fields:
        if sent.get(name):
            raise BadRequest(
                f"{name} is not served by this endpoint. Leave it out.", param=name, code="unsupported_value"
            )


def single(chat: ChatBody) -> ChatBody:
    """`chat`, for a protocol whose reply has one choice. Raises BadRequest if it asks for several."""
    if chat.sampling().n > 1:
        raise BadRequest(
            f"n is {chat.n}; a reply of this protocol has one choice. Leave n out, and send a request for each choice, "
            "or use /v1/chat/completions.",
            param="n", code="unsupported_value",
        )  # fmt: skip
    return chat


def text_at(content: Any, field: str, first: int = 0) -> str:
    """The text of `content`, the field `field`; `first`: the index of the first of its parts. Raises BadRequest."""
    try:
        return text_of(content, field, first)
    except UnreadableContent as error:
        raise unreadable(error) from error
