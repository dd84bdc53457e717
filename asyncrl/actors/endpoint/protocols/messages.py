"""Anthropic's Messages API, `POST /v1/messages`: blocks instead of tool calls and tool messages.

A reply of the policy becomes at most one `thinking` block, one `text` and its `tool_use`s; such blocks in a request are
one assistant message again, so the session recognises its own replies. A `tool_use` holds
only a JSON object: other arguments become `{"unparsed_arguments": the text}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from asyncrl.actors.endpoint.protocols.protocol import Asked, Histories, Json, Protocol, server_sent
from asyncrl.actors.endpoint.protocols.reading import json_object, objects, refuse, single, text_at
from asyncrl.actors.endpoint.requests import BadRequest, chat_of
from asyncrl.data.base import Message

UNPARSED = "unparsed_arguments"

_NAMES = {"response_format": "output_config.format", "stop": "stop_sequences"}
_UNSERVED = ("container", "mcp_servers")
_TRANSLATED = frozenset(
    {
        "messages", "system", "tools", "tool_choice", "stop_sequences", "output_config", "output_format", "metadata",
        *_UNSERVED,
    }
)  # fmt: skip
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def read(raw: bytes, histories: Histories) -> Asked:
    """Raises BadRequest."""
    sent = json_object(raw)
    refuse(sent, _UNSERVED)
    messages = [
        turned
        for index, message in enumerate(objects(sent.get("messages"), "messages"))
        for turned in _messages(message, f"messages[{index}]")
    ]
    if messages and messages[-1]["role"] == "assistant":
        raise BadRequest(
            "messages ends with an assistant message: this endpoint does not continue text that the policy did not "
            "sample. End with a message of the user.",
            param="messages", code="unsupported_value",
        )  # fmt: skip
    system = text_at(sent.get("system"), "system")
    config = sent.get("output_config")
    translated = {
        "messages": [*([{"role": "system", "content": system}] if system else []), *messages],
        "tools": [_tool(tool, index) for index, tool in enumerate(objects(sent.get("tools"), "tools"))] or None,
        "tool_choice": _tool_choice(sent.get("tool_choice")),
        "stop": sent.get("stop_sequences"),
        "response_format": (config.get("format") if isinstance(config, dict) else None) or sent.get("output_format"),
    }
    fields = {name: value for name, value in sent.items() if name not in _TRANSLATED} | translated
    chat = single(chat_of({name: value for name, value in fields.items() if value is not None}, _NAMES))
    return Asked(chat, sent)


def _messages(message: Json, at: str) -> Iterator[Message]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield _assistant(_blocks(content, f"{at}.content"), at)
        return
    if role == "system" or not isinstance(content, list):
        yield {"role": role, "content": text_at(content, f"{at}.content")}
        return
    text: list[str] = []
    for index, block in enumerate(_blocks(content, f"{at}.content")):
        field = f"{at}.content[{index}]"
        if block.get("type") == "tool_result":
            yield from _user(text)
            output = text_at(block.get("content"), f"{field}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": output}
        else:
            text.append(text_at([block], f"{at}.content", index))
    yield from _user(text)


def _user(text: list[str]) -> Iterator[Message]:
    """One user message of the collected `text`, which is cleared; nothing if it is empty."""
    if text:
        yield {"role": "user", "content": "".join(text)}
        text.clear()


def _assistant(blocks: list[Json], at: str) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "tool_use":
                given = block.get("input")
                unparsed = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
                function = {"name": block.get("name"), "arguments": given if unparsed is None else unparsed}
                call = {"id": block.get("id", ""), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "thinking":
                message["reasoning_content"] = str(block.get("thinking", ""))
            case _:
                message["content"] += text_at([block], f"{at}.content", index)
    return message


def _blocks(content: Any, field: str) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, field)


def _tool(tool: Json, index: int) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise BadRequest(
            f"tools[{index}] is of type {tool['type']!r}; expected custom, or no type: only the agent's own tools",
            param=f"tools[{index}].type", code="unsupported_value",
        )  # fmt: skip
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if tool.get("description") is not None else {}
    return {"type": "function", "function": function | described}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _TOOL_CHOICES.get(str(choice.get("type")), choice)


def answer(asked: Asked, completion: Json) -> Json:
    """A `message`."""
    (choice,) = completion["choices"]
    usage = completion["usage"]
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    stop_string = choice["stop_reason"]
    return {
        "id": f"msg_{completion['id'].partition('-')[2]}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": _content(choice["message"]),
        "stop_reason": reasons[choice["finish_reason"]] if stop_string is None else "stop_sequence",
        "stop_sequence": stop_string,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        },
    }


def _content(message: Json) -> list[Json]:
    blocks: list[Json] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        name, given = call["function"]["name"], _input(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    return blocks


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def events(asked: Asked, reply: Json) -> str:
    """The reply as the events that Anthropic sends, each block with one delta."""
    return server_sent(_events(reply))


def _events(reply: Json) -> Iterator[Json]:
    begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": reply | begun | {"usage": reply["usage"] | {"output_tokens": 0}}}
    for index, block in enumerate(reply["content"]):
        empty, delta = _begun(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": reply["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def _begun(block: Json) -> tuple[Json, Json]:
    """A block before its content, and its content."""
    match block["type"]:
        case "tool_use":
            return block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        case "thinking":
            return block | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            return block | {"text": ""}, {"type": "text_delta", "text": block["text"]}


def _error(message: str, kind: str, field: str | None, code: str | None) -> Json:
    kinds = {"server_error": "api_error", "invalid_request_error": "invalid_request_error"}
    error = {"type": kinds[kind], "message": message, "param": field, "code": code}
    return {"type": "error", "error": error}


# Anthropic's client appends /v1/messages to its base URL; the second path is for a base URL that already ends with /v1.
MESSAGES = Protocol(("/v1/messages", "/v1/v1/messages"), read, answer, events, _error, _NAMES)
