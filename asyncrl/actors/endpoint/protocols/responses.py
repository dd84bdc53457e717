"""OpenAI's Responses API, `POST /v1/responses`: items instead of messages, and a stream of typed events.

A reply of the policy becomes at most one `reasoning` item, one `message` and its `function_call`s, in this order; such
items in a request are one assistant message again, so the session recognises its own replies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.actors.endpoint.protocols.protocol import Asked, Histories, Json, Protocol, server_sent
from asyncrl.actors.endpoint.protocols.reading import json_object, objects, refuse, single, text_at
from asyncrl.actors.endpoint.replies import error_json
from asyncrl.actors.endpoint.requests import BadRequest, chat_of
from asyncrl.data.base import Message

_NAMES = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
_UNSERVED = ("background", "conversation", "prompt")
_TRANSLATED = frozenset(
    {
        "input", "instructions", "previous_response_id", "tools", "tool_choice", "text", "max_output_tokens", "include",
        *_UNSERVED,
    }
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


def read(raw: bytes, histories: Histories) -> Asked:
    """Raises BadRequest."""
    sent = json_object(raw)
    refuse(sent, _UNSERVED)
    history = [*_earlier(sent.get("previous_response_id"), histories), *_messages(sent.get("input"))]
    instructions = sent.get("instructions")
    first = [{"role": "system", "content": instructions}] if isinstance(instructions, str) and instructions else []
    text, include = sent.get("text"), sent.get("include")
    translated = {
        "messages": [*first, *history],
        "tools": [_tool(tool, index) for index, tool in enumerate(objects(sent.get("tools"), "tools"))] or None,
        "tool_choice": _tool_choice(sent.get("tool_choice")),
        "response_format": text.get("format") if isinstance(text, dict) else None,
        "max_tokens": sent.get("max_output_tokens"),
        "logprobs": True if isinstance(include, list) and _LOGPROBS in include else None,
    }
    fields = {name: value for name, value in sent.items() if name not in _TRANSLATED} | translated
    chat = single(chat_of({name: value for name, value in fields.items() if value is not None}, _NAMES))
    return Asked(chat, sent, chat.messages[len(first) :])


def _earlier(id: Any, histories: Histories) -> list[Message]:
    if id is None:
        return []
    if id not in histories:
        raise BadRequest(
            f"previous_response_id is {id!r}; expected the id of a response of this episode",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    return [*histories[id]]


def _messages(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    assistant: Message | None = None
    for index, item in enumerate(objects(given, "input")):
        role = "assistant" if item.get("type") in ("function_call", "reasoning") else item.get("role")
        if role != "assistant":
            assistant = None
            messages.append(_other(item, index))
            continue
        # A reply is reasoning, text and calls in this order: an item that breaks it begins another reply.
        if assistant is None or _begins_another(item, assistant):
            assistant = {"role": "assistant", "content": ""}
            messages.append(assistant)
        _extend(assistant, item, index)
    return messages


def _begins_another(item: Json, assistant: Message) -> bool:
    if item.get("type") == "function_call":
        return False
    past_reasoning = "text" in assistant or "tool_calls" in assistant
    return past_reasoning or (item.get("type") == "reasoning" and "reasoning_content" in assistant)


def _extend(assistant: Message, item: Json, index: int) -> None:
    """Add an item of the policy to its message. `text` marks that its text is there; chat completions ignore it."""
    at = f"input[{index}]"
    match item.get("type"):
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            assistant.setdefault("tool_calls", []).append(call)
        case "reasoning":
            assistant["reasoning_content"] = text_at(item.get("content") or item.get("summary"), f"{at}.content")
        case _:
            assistant["content"] = text_at(item.get("content"), f"{at}.content")
            assistant["text"] = True


def _other(item: Json, index: int) -> Message:
    """A message of the user, of the system, or of a tool."""
    at, kind = f"input[{index}]", item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": text_at(item.get("content"), f"{at}.content")}
    if kind == "function_call_output":
        output = text_at(item.get("output"), f"{at}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise BadRequest(
        f"{at} is of type {kind!r}, which this endpoint does not serve; expected message, reasoning, function_call or "
        "function_call_output",
        param=at, code="unsupported_value",
    )  # fmt: skip


def _tool(tool: Json, index: int) -> Json:
    if tool.get("type") != "function":
        raise BadRequest(
            f"tools[{index}] is of type {tool.get('type')!r}; this endpoint serves tools of type function only",
            param=f"tools[{index}].type", code="unsupported_value",
        )  # fmt: skip
    named = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": named}


def _tool_choice(choice: Any) -> Any:
    """A named function as a chat completion names it; any other choice is the same word, or a constraint."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def answer(asked: Asked, completion: Json) -> Json:
    """A `response`."""
    (choice,) = completion["choices"]
    whole = choice["finish_reason"] != "length"
    sent, usage = asked.sent, completion["usage"]
    id = completion["id"].partition("-")[2]
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": completion["created"],
        "status": "completed" if whole else "incomplete",
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "instructions": sent.get("instructions"),
        "max_output_tokens": sent.get("max_output_tokens"),
        "metadata": sent.get("metadata") or {},
        "model": completion["model"],
        "output": _items(choice, id, "completed" if whole else "incomplete"),
        "parallel_tool_calls": sent.get("parallel_tool_calls") is not False,
        "previous_response_id": sent.get("previous_response_id"),
        "store": sent.get("store", True),
        "temperature": sent.get("temperature"),
        "text": sent.get("text") or {"format": {"type": "text"}},
        "tool_choice": sent.get("tool_choice") or "auto",
        "tools": sent.get("tools") or [],
        "top_p": sent.get("top_p"),
        "truncation": "disabled",
        "system_fingerprint": completion["system_fingerprint"],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(choice: Json, id: str, status: str) -> list[Json]:
    """The items of a reply, of which the last one may be incomplete."""
    message, items = choice["message"], list[Json]()
    if thought := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thought}
        items.append({"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": [part]})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        logprobs = (choice["logprobs"] or {}).get("content", [])
        part = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{id}", "role": "assistant", "content": [part]})
    for index, call in enumerate(calls):
        function = call["function"]
        items.append({"type": "function_call", "id": f"fc_{id}_{index}", "call_id": call["id"], **function})
    last = len(items) - 1
    return [item | {"status": status if index == last else "completed"} for index, item in enumerate(items)]


def events(asked: Asked, reply: Json) -> str:
    """The reply as the events that OpenAI sends, numbered, each item with one delta."""
    numbered = ({**event, "sequence_number": number} for number, event in enumerate(_events(reply)))
    return server_sent(numbered)


def _events(reply: Json) -> Iterator[Json]:
    begun = reply | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(reply["output"]):
        at = {"output_index": index}
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **at, "item": item | empty | {"status": "in_progress"}}
        at |= {"item_id": item["id"]}
        yield from _call_events(item, at) if item["type"] == "function_call" else _text_events(item, at)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{reply['status']}", "response": reply}


def _call_events(item: Json, at: Json) -> Iterator[Json]:
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
    yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}


def _text_events(item: Json, at: Json) -> Iterator[Json]:
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    kind = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    unread: Json = {"logprobs": []} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": part | {"text": ""} | unread}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


RESPONSES = Protocol(("/v1/responses",), read, answer, events, error_json, _NAMES)
