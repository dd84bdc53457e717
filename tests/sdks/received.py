"""What an agent received, read from the replies on the wire, in the form in which a row's tokens are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Said = tuple[str, tuple[tuple[str, str], ...]]
"""The text of a reply, and its calls: names and arguments, as JSON with sorted keys where they are an object."""


def said_in(path: str, reply: str) -> list[Said]:
    """The replies of one exchange."""
    streamed = reply.startswith(("data:", "event:"))
    if path.endswith("/chat/completions"):
        return _chunks(reply) if streamed else [_chat(c["message"]) for c in json.loads(reply)["choices"]]
    if path.endswith("/responses"):
        return [_items((_events(reply)[-1]["response"] if streamed else json.loads(reply))["output"])]
    assert path.endswith("/messages"), path
    return [_blocks(list(_streamed_blocks(reply)) if streamed else json.loads(reply)["content"])]


def said_of(message: Mapping[str, Any], stops: Sequence[str]) -> Said:
    """A message parsed from sampled tokens, cut at the first of the agent's stop strings."""
    text = message["content"]
    for stop in stops:
        text = text.partition(stop)[0]
    calls = message.get("tool_calls") or []
    return text, tuple((c["function"]["name"], _sorted(c["function"]["arguments"])) for c in calls)


def stops_of(request: Mapping[str, Any]) -> list[str]:
    given = request.get("stop") or request.get("stop_sequences") or []
    return [given] if isinstance(given, str) else list(given)


def _sorted(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            return arguments
        return json.dumps(read, sort_keys=True) if isinstance(read, dict) else arguments
    unparsed = arguments.get("unparsed_arguments") if len(arguments) == 1 else None
    return json.dumps(arguments, sort_keys=True) if unparsed is None else unparsed


def _chat(message: Mapping[str, Any]) -> Said:
    calls = message.get("tool_calls") or []
    return message["content"] or "", tuple((c["function"]["name"], _sorted(c["function"]["arguments"])) for c in calls)


def _items(items: Sequence[Any]) -> Said:
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    return text, tuple((i["name"], _sorted(i["arguments"])) for i in items if i["type"] == "function_call")


def _blocks(blocks: Sequence[Any]) -> Said:
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, tuple((b["name"], _sorted(b["input"])) for b in blocks if b["type"] == "tool_use")


def _events(stream: str) -> list[Any]:
    lines = (line.removeprefix("data:").strip() for line in stream.splitlines() if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _streamed_blocks(stream: str) -> Iterator[Any]:
    blocks: list[Any] = []
    for event in _events(stream):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
    return iter(blocks)


def _chunks(stream: str) -> list[Said]:
    text, calls = "", list[Any]()
    for chunk in _events(stream):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls") or []
    return [_chat({"content": text, "tool_calls": calls})]
