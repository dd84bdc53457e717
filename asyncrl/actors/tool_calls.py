"""Tool calls in a model's text, per family of chat format: parsed from what was sampled, written for demonstrations.

A call is an OpenAI `tool_calls` entry whose `arguments` are a dict, as chat templates want them. What cannot be read
stays in the message as a call with the raw text as `arguments`, so that the environment can say what was wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

ToolCall = dict[str, Any]
"""`{"id", "type": "function", "function": {"name": str, "arguments": dict, or str where it is no JSON object}}`."""


class ToolCallFormat(Protocol):
    """How one model family writes tool calls."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text outside the calls, and the calls in order. Never raises."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call as the model would write it."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3.

    >>> Hermes().parse('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[1][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """

    _call = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls = [_tool_call(index, body) for index, body in enumerate(self._call.findall(text))]
        return self._call.sub("", text).strip() if calls else text, calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>{body}</tool_call>"


def _tool_call(index: int, body: str) -> ToolCall:
    name: Any = ""
    arguments: Any = body
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        name, arguments = value["name"], value.get("arguments", {})
        if not isinstance(arguments, dict):
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_CALL_FORMATS: dict[str, Callable[[], ToolCallFormat]] = {"hermes": Hermes}
"""`actors.tool_calls` names one of these, or gives an import path of its own."""


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's arguments as a dict; None where they are no JSON object (a string that holds one is decoded)."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None
