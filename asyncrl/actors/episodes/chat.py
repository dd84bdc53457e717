"""An episode played by a model behind an OpenAI-compatible endpoint: messages in both directions, no tokens.

For evaluation only, since without tokens nothing can be trained. Environment and limits are those of training.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.actors.envs.protocol import Env, Message, Turn
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.errors import ConfigError
from asyncrl.rewards.http import ServiceFailed, get, post
from asyncrl.trajectory import StopReason, Ticket, TurnRecord


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The outcome of an episode."""

    task_id: str
    reward: float
    rewards: Mapping[str, float]
    stop_reason: StopReason
    messages: Sequence[Message]
    """The conversation, the model's last message included."""
    turn_records: Sequence[TurnRecord]
    """One per turn; `sampled` and `prefilled` are 0 where the endpoint does not count tokens."""


class ContextFull(EpisodeFailed):
    """The conversation leaves the served model no room for a reply."""


_FULL = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
"""Each service words this refusal differently; these words are used by OpenAI, vLLM, SGLang and llama.cpp."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model behind an endpoint."""

    url: str
    """The address up to and including `/v1`."""
    model: str
    headers: Mapping[str, str]
    timeout_s: float
    """Deadline of one request, which is retried when the service is busy or does not answer."""

    @classmethod
    async def at(
        cls, url: str, model: str | None, api_key_env: str | None, timeout_s: float, option: str = "--endpoint"
    ) -> ServedModel:
        """`model` None: the one that the endpoint lists. `option` is the one that gave the URL. Raises ConfigError if
        it does not list exactly one model, or does not answer."""
        if api_key_env is not None and api_key_env not in os.environ:
            raise ConfigError(f"--api-key-env is {api_key_env!r}, which is not set in the environment.")
        headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
        url = url.rstrip("/")
        if model is None:
            try:
                listed = [
                    str(entry["id"]) for entry in (await get(f"{url}/models", headers=headers, retries=1))["data"]
                ]
            except (ServiceFailed, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{option} is {url!r}, which does not list its models ({type(error).__name__}: {error}): give "
                    "the address up to and including /v1, and --served-name if it has no such list."
                ) from error
            if len(listed) != 1:
                raise ConfigError(f"{option} serves {', '.join(listed) or 'no model'}: choose with --served-name.")
            model = listed[0]
        return cls(url, model, headers, timeout_s)

    async def ask(self, body: Mapping[str, Any]) -> Any:
        """The reply to a chat completion. Raises ContextFull, and EpisodeFailed for every other failure."""
        try:
            return await post(
                f"{self.url}/chat/completions", {"model": self.model, **body}, headers=self.headers,
                timeout_s=self.timeout_s,
            )  # fmt: skip
        except ServiceFailed as error:
            full = _FULL.search(str(error)) and "refused: 400" in str(error)
            raise (ContextFull if full else EpisodeFailed)("endpoint", str(error)) from error


async def chat(ticket: Ticket, make_env: Callable[[], Env], served: ServedModel, limits: EpisodeLimits) -> ChatResult:
    """Play the episode of `ticket`. Raises EpisodeFailed: `env_error`, or `endpoint` when the endpoint does not answer,
    or not with a chat completion."""
    env = GuardedEnv(make_env, limits.call_s, limits.max_reward)
    playing = _Chat(ticket, env, served, limits)
    try:
        stop_reason = await playing.run()
    finally:
        await env.close()
    told = playing.messages, playing.records
    return ChatResult(str(ticket.task["id"]), env.reward, env.rewards, stop_reason, *told)


@dataclass(slots=True)
class _Chat:
    """The state of one episode: the conversation so far."""

    _ticket: Ticket
    _env: GuardedEnv
    _served: ServedModel
    _limits: EpisodeLimits
    messages: list[Message] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)

    async def run(self) -> StopReason:
        self.messages = await self._env.reset({**self._ticket.task, "episode": self._ticket.id.index})
        total = 0
        for turn in range(self._limits.max_turns):
            began = time.monotonic()
            try:
                reply = await self._served.ask(self._body(turn, total))
            except ContextFull:
                if turn == 0:
                    raise
                return "max_tokens"  # like `env.max_tokens`: the episode ends with the reward so far
            message, sampled, total = _read(reply)
            step = await self._stepped(message, sampled, total, began, last=turn + 1 == self._limits.max_turns)
            if step.done:
                return "length" if _cut_short(reply) else "done"
            if total >= self._limits.max_tokens:
                return "max_tokens"
        return "max_turns"

    async def _stepped(self, message: Message, sampled: int | None, total: int, began: float, *, last: bool) -> Turn:
        """The environment's answer to a message of the model, recorded."""
        answered = time.monotonic()
        step = await self._env.step({**message, "tokens": sampled, "last": last})
        cost = time.monotonic() - answered
        prompt = max(0, total - (sampled or 0))  # a service may count one and not the other
        self.records.append(TurnRecord(None, answered - began, cost, prompt, sampled or 0))
        self.messages = [*self.messages, message, *step.messages]
        full = total >= self._limits.max_tokens
        if not (step.messages or step.done or last or full):
            raise EpisodeFailed("env_error", "environment.step returned no messages although the episode is not done")
        return step

    def _body(self, turn: int, total: int) -> dict[str, Any]:
        ticket, limits = self._ticket, self._limits
        # A service may accept seeds of 32 bits only.
        body = {
            "messages": self.messages,
            "temperature": ticket.temperature,
            "top_p": limits.top_p,
            # No part of OpenAI's protocol, which vLLM and SGLang take: a service that does not may refuse them.
            **({"top_k": limits.top_k} if limits.top_k else {}),
            **({"min_p": limits.min_p} if limits.min_p else {}),
            "seed": (ticket.seed + turn) % 2**31,
            "max_tokens": min(limits.max_new_tokens, limits.max_tokens - total),
        }
        return body | ({"tools": self._env.tools} if self._env.tools else {})


def _cut_short(reply: Any) -> bool:
    """Whether the model was stopped at `max_tokens`."""
    return bool(reply["choices"][0].get("finish_reason") == "length")


def _read(reply: Any) -> tuple[Message, int | None, int]:
    """(message, tokens sampled for it, tokens of the whole conversation), as far as the endpoint counts them."""
    try:
        received = reply["choices"][0]["message"]
        content, calls = received.get("content"), received.get("tool_calls") or []
        if not isinstance(content, str | None) or not all(isinstance(call["function"]["name"], str) for call in calls):
            raise TypeError("content is not a text, or a tool call has no name")
        usage = reply.get("usage") or {}
        sampled = usage.get("completion_tokens")
        total = int(usage.get("total_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EpisodeFailed(
            "endpoint", f"the endpoint answered {reply!r:.300}: not a chat completion ({error})"
        ) from error
    message: Message = {"role": "assistant", "content": content or ""}
    return message | ({"tool_calls": calls} if calls else {}), sampled, total
