"""OpenAI's chat completions, `POST /v1/chat/completions`: the form that the others are translated into."""

from __future__ import annotations

from asyncrl.actors.endpoint.protocols.protocol import Asked, Histories, Json, Protocol
from asyncrl.actors.endpoint.replies import chat_events, error_json
from asyncrl.actors.endpoint.requests import read_chat


def _read(raw: bytes, histories: Histories) -> Asked:
    return Asked(read_chat(raw), {})


def _answer(asked: Asked, completion: Json) -> Json:
    return completion


def _events(asked: Asked, completion: Json) -> str:
    return chat_events(asked.chat, completion)


CHAT = Protocol(("/v1/chat/completions",), _read, _answer, _events, error_json)
