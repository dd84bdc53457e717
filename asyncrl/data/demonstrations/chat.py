"""One demonstration: a chat, checked, as the JSON that the buffer sends and the learner renders. Pure.

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "content": "...", "tool_calls": [...]}, ...],
     "tools": [...]}

`tools` are schemas in OpenAI form. What follows the last assistant message is left out: nothing of it is trained on.
Which roles there are is the chat template's to say, when the learner renders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.data.base import Message
from asyncrl.errors import ConfigError

MAX_BYTES = 4 << 20
"""Most bytes of one chat."""
MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Message]
    """The last one is the assistant's."""
    tools: list[dict[str, Any]]


def encoded(row: Any, where: str) -> bytes:
    """The row as JSON, in one form whatever kind of file it came from. Raises ConfigError naming `where`."""
    if not isinstance(row, Mapping) or not isinstance(row.get("messages"), list):
        has = f"an object with {', '.join(map(str, row)) or 'nothing'}" if isinstance(row, Mapping) else _kind(row)
        raise ConfigError(
            f"{where} holds {has}: expected an object with `messages`, a list of chat messages, and optionally `tools`."
        )
    messages = [_message(message, f"{where}: message {i}") for i, message in enumerate(row["messages"])]
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise ConfigError(
            f"{where} has no assistant message (its roles: {roles}), so there is nothing to train on: add the answer, "
            "or leave the row out."
        )
    if len(messages) > MAX_MESSAGES:
        raise ConfigError(f"{where} has {len(messages)} messages, at most {MAX_MESSAGES} are read: split the chat.")
    content = {"messages": messages[: last + 1], "tools": _tools(row.get("tools"), where)}
    try:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # UnicodeEncodeError is a ValueError
        raise ConfigError(f"{where} cannot be sent as JSON: {error}. Use texts, numbers, lists and objects.") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} has {len(text)} bytes, at most {MAX_BYTES} are read: split the chat.")
    return text


def decoded(text: bytes) -> Chat:
    """The inverse of `encoded`."""
    content = json.loads(text)
    return Chat(content["messages"], content["tools"])


def digest(text: bytes) -> bytes:
    """16 bytes."""
    return hashlib.blake2b(text, digest_size=16).digest()


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where} is {_kind(message)} without a role: expected `role` and `content`.")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ConfigError(f"{where} has {_kind(calls)} as its tool_calls: expected a list.")
    if not (isinstance(content, str) or (content is None and calls)):
        raise ConfigError(
            f"{where} ({role}) has {_kind(content)} as its content: expected text, and for an assistant that only "
            "calls tools `tool_calls`."
        )
    kept = {str(key): value for key, value in message.items() if value is not None}
    kept["content"] = content or ""
    if calls:
        kept["tool_calls"] = [_call(call, where) for call in calls]
    else:
        kept.pop("tool_calls", None)
    return kept


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments are an object, as chat templates expect and episodes have them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{where} has a tool call without a function's name: expected "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where} calls {function['name']} with arguments that are not JSON ({error}): give an object."
            ) from error
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{where} calls {function['name']} with {_kind(arguments)} as arguments: give an object.")
    return {**call, "type": "function", "function": {**function, "arguments": dict(arguments)}}


def _tools(tools: Any, where: str) -> list[Any]:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} has tools that are not JSON ({error}): give a list of schemas.") from error
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError(f"{where} has {_kind(tools)} as its tools: expected a list of schemas in OpenAI form.")
    return tools


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
