"""Tool calls in a model's text, per family of chat formats: parsed from sampled text, written for demonstrations.

A call is an OpenAI `tool_calls` entry whose `arguments` are a dict, as chat templates expect. A call that cannot be
parsed stays in the message with the raw text as `arguments`, so that the environment can tell the policy what is wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

ToolCall = dict[str, Any]
"""`{"id", "type": "function", "function": {"name": str, "arguments": dict, or str if not a JSON object}}`."""


class ToolCallFormat(Protocol):
    """The tool calls of one model family."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text outside the calls, and the calls in order. Never raises."""
        ...

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call in the model's form."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3.

    >>> Hermes().parse('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')[1][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """

    _call = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls = [self._read(index, body.strip()) for index, body in enumerate(self._call.findall(text))]
        return self._call.sub("", text).strip() if calls else text, calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>{body}</tool_call>"

    def _read(self, index: int, body: str) -> ToolCall:
        value, end = _json_at(body)
        return _call_of(index, value if end == len(body) else None, body, "arguments")


class LlamaJson:
    """`{"name": ..., "parameters": {...}}` as the whole message, several separated by `;`: Llama 3.1 and later.

    >>> LlamaJson().parse('<|python_tag|>{"name": "add", "parameters": {"a": 1}}')[1][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """

    _tag = "<|python_tag|>"

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        before, tag, rest = text.rpartition(self._tag)
        if not tag and not _names_a_tool(rest):
            return text, []  # a final text may be JSON, too
        calls: list[ToolCall] = []
        while rest := rest.lstrip(" \t\r\n;,"):
            value, end = _json_at(rest)
            calls.append(_call_of(len(calls), value, rest[:end], "parameters", "arguments"))
            rest = rest[end:]
        return before.strip() if calls else text, calls

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


class Pythonic:
    """`[add(a=1, b=2), now()]` as the whole message: Llama 3.2 and 4. Arguments are literals, by keyword.

    >>> Pythonic().parse("[add(a=1, b=-2), now()]")[1][0]["function"]
    {'name': 'add', 'arguments': {'a': 1, 'b': -2}}
    """

    _begins = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
        cut_off = "]" not in body
        if not self._begins.match(body) or not (cut_off or body.endswith("]")):
            return text, []
        try:
            listed = ast.parse(body, mode="eval").body
            if not isinstance(listed, ast.List):
                raise ValueError("not a list of calls")
            return "", [self._read(index, call) for index, call in enumerate(listed.elts)]
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return "", [_tool_call(0, "", body)]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"

    def _read(self, index: int, call: ast.expr) -> ToolCall:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("not a call by keyword")
        arguments = {str(word.arg): ast.literal_eval(_JsonWords().visit(word.value)) for word in call.keywords}
        json.dumps(arguments)  # sets and bytes are literals but not JSON: TypeError
        return _tool_call(index, ast.unparse(call.func), arguments)


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's constants, which a model may write in place of Python's."""

    _words: Mapping[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._words[node.id]) if node.id in self._words else node


class Mistral:
    """`[TOOL_CALLS]` and either a JSON list of calls, or `name[ARGS]{...}`, repeated: Mistral, Ministral, Magistral.

    >>> Mistral().parse('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')[1][0]["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """

    _mark = "[TOOL_CALLS]"

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        content, *parts = text.split(self._mark)
        calls: list[ToolCall] = []
        for part in map(str.strip, parts):
            calls += self._read(len(calls), part)
        return content.strip() if calls else text, calls

    def _read(self, first: int, part: str) -> list[ToolCall]:
        """The calls after one mark; `first`: the index of the first of them."""
        value, _ = _json_at(part)
        if isinstance(value, list):
            return [_call_of(first + i, entry, json.dumps(entry), "arguments") for i, entry in enumerate(value)]
        if value is not None or (at := part.find("{")) <= 0:
            return [_call_of(first, value, part, "arguments")]
        name, _, id = part[:at].strip().removesuffix("[ARGS]").partition("[CALL_ID]")
        arguments, end = _json_at(part[at:])
        complete = arguments is not None and not part[at + end :].strip()
        return [_tool_call(first, name.strip(), arguments if complete else part[at:], id.strip())]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self._mark}{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def _names_a_tool(text: str) -> bool:
    value, _ = _json_at(text.lstrip())
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    return named and ("parameters" in value or "arguments" in value)


def _json_at(text: str) -> tuple[Any, int]:
    """The JSON value at the start of `text`, and its end; (None, the end of `text`) if there is none, or one nested too
    deeply to be serialised everywhere."""
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None, len(text)
    return (None, len(text)) if _is_deeper(value, _MAX_DEPTH) else (value, end)


def _is_deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(depth == 0 or _is_deeper(part, depth - 1) for part in inner)


def _call_of(index: int, value: Any, raw: str, *keys: str) -> ToolCall:
    """A call from its JSON object; its arguments are under the first of `keys` that it has."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _tool_call(index, "", raw)
    return _tool_call(index, value["name"], next((value[key] for key in keys if key in value), {}), value.get("id"))


def _tool_call(index: int, name: str, arguments: Any, id: Any = None) -> ToolCall:
    if not isinstance(arguments, dict | str):
        arguments = json.dumps(arguments)
    elif "\\ud" in (written := json.dumps([name, arguments])):
        # JSON can hold half a surrogate pair, but nothing that a call is sent through accepts it.
        name, arguments = json.loads(json.dumps(json.loads(written), ensure_ascii=False).encode(errors="replace"))
    # Mistral's templates accept only ids of nine letters and digits; the others accept any.
    id = id if isinstance(id, str) and _ID.fullmatch(id) else f"call{index:05d}"
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


_DECODER = json.JSONDecoder()
_MAX_DEPTH = 100
_ID = re.compile(r"[A-Za-z0-9]{9}")

TOOL_CALL_FORMATS: dict[str, Callable[[], ToolCallFormat]] = {
    "hermes": Hermes,
    "llama": LlamaJson,
    "mistral": Mistral,
    "pythonic": Pythonic,
}
"""`actors.tool_calls` names one of these, or gives an import path."""


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's arguments as a dict, decoded if they are a string; None if they are not a JSON object."""
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None
