"""Replies to agents, in OpenAI's chat dialect and in vLLM's token dialect: plain data for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from asyncrl.actors.endpoint.requests import ChatBody, TokenBody
from asyncrl.actors.engines.protocol import Generation
from asyncrl.data.base import Message
from asyncrl.trajectory import TurnRecord
from asyncrl.trajectory.turns import MAX_RECORDS


@dataclass(slots=True, eq=False)
class TurnCost:
    """What a generation took, and the agent after it."""

    generation: Generation
    seconds: float
    agent_s: float | None = None
    """Seconds until the agent's next request or its end; None while they run, and where another request ran."""

    def record(self, new: int) -> TurnRecord:
        """`new`: tokens of the prompt that the row did not hold, for an engine that does not count what it prefills."""
        g = self.generation
        prefilled = new if g.prefilled is None else g.prefilled
        return TurnRecord(g.queue_s, self.seconds, self.agent_s, prefilled, len(g.token_ids))


def of_one_turn(choices: Sequence[TurnRecord]) -> TurnRecord:
    """The record of a turn whose `choices` were generated at the same time."""
    queues = [record.queue for record in choices if record.queue is not None]
    waits = [record.environment for record in choices if record.environment is not None]
    return TurnRecord(
        max(queues, default=None),
        max(record.generate for record in choices),
        max(waits, default=None),
        sum(record.prefilled for record in choices),
        sum(record.sampled for record in choices),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of the `n` outputs of a request."""

    generation: Generation
    message: Message
    """The message that the agent reads; empty in the token dialect."""
    finish_reason: Literal["stop", "length"]
    cost: TurnCost
    """Cost of the generation before anything was cut off it."""
    cut_at: str | None = None
    """The stop string at which the reply was cut off."""

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = self.generation.token_ids.tolist()
        return ids

    @property
    def logprobs(self) -> list[float]:
        logprobs: list[float] = self.generation.logprobs.tolist()
        return logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """All choices of one request."""

    prompt: list[int]
    choices: list[Choice]
    number: int = MAX_RECORDS
    """Of the recorded turn (recorded.py); the same for all that are not recorded."""


def message_json(message: Message) -> dict[str, Any]:
    """The assistant's message in OpenAI's form: arguments as a text, content null if there are only calls."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]
    content = message["content"] or None if calls else message["content"]
    thought = {name: message[name] for name in ("reasoning_content",) if name in message}
    return {"role": "assistant", "content": content, **thought} | ({"tool_calls": calls} if calls else {})


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def chat_json(
    body: ChatBody, head: dict[str, Any], reply: Reply, text: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """A `chat.completion`. `head`: its id, time, model and fingerprint. `text`: decodes single tokens."""
    choices = []
    for index, choice in enumerate(reply.choices):
        entry = {
            "index": index,
            "message": message_json(choice.message),
            "finish_reason": _finish_reason(choice),
            "stop_reason": choice.cut_at,
            "logprobs": _logprobs(choice, text) if body.logprobs else None,
        }
        choices.append(entry | ({"token_ids": choice.token_ids} if body.return_token_ids else {}))
    completion = head | {"object": "chat.completion", "choices": choices, "usage": _usage(reply)}
    return completion | ({"prompt_token_ids": reply.prompt} if body.return_token_ids else {})


def chat_events(body: ChatBody, completion: dict[str, Any]) -> str:
    """The same completion as server-sent events, for a client that streams."""
    head = {name: completion[name] for name in ("id", "created", "model", "system_fingerprint")}
    head["object"] = "chat.completion.chunk"
    usage = body.stream_options is not None and body.stream_options.include_usage
    chunks = []

    def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> None:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        chunks.append(head | {"choices": [choice]} | ({"usage": None} if usage else {}))

    for choice in completion["choices"]:
        index, message = choice["index"], choice["message"]
        chunk(index, {"role": "assistant", "content": ""})
        if message["content"]:
            chunk(index, {"content": message["content"]}, None, choice["logprobs"])
        for at, call in enumerate(message.get("tool_calls", ())):
            chunk(index, {"tool_calls": [{"index": at, **call}]})
        chunk(index, {}, choice["finish_reason"], None if message["content"] else choice["logprobs"])
    if usage:
        chunks.append(head | {"choices": [], "usage": completion["usage"]})
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


def tokens_json(body: TokenBody, reply: Reply) -> dict[str, Any]:
    """The reply in vLLM's form: ids, logprobs, and the policy versions as spans of output tokens."""
    choices = [
        {
            "index": index,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "logprobs": {
                "content": [
                    {"token": f"token_id:{id}", "token_id": id, "logprob": logprob, "top_logprobs": []}
                    for id, logprob in zip(choice.token_ids, choice.logprobs, strict=True)
                ]
            },
            "weight_versions": _spans(choice.generation.versions.tolist()),
        }
        for index, choice in enumerate(reply.choices)
    ]
    return {"request_id": body.request_id, "choices": choices, "usage": _usage(reply)}


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _finish_reason(choice: Choice) -> str:
    return "tool_calls" if choice.finish_reason == "stop" and choice.message.get("tool_calls") else choice.finish_reason


def _logprobs(choice: Choice, text: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    content = []
    for id, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
        token = text([id])
        content.append(
            {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
        )
    return {"content": content, "refusal": None}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = len(reply.prompt), sum(len(choice.token_ids) for choice in reply.choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    spans, start = [], 0
    for version, same in groupby(versions):
        end = start + len(list(same))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans
