"""An episode played by a model behind an OpenAI-compatible endpoint: messages in both directions, no tokens.

For evaluation only, since without tokens nothing can be trained. Environment and limits are those of training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.actors.envs.protocol import Env, Message
from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
from asyncrl.actors.episodes.progress import EpisodeLimits
from asyncrl.errors import ConfigError
from asyncrl.rewards.http import ServiceFailed, get, post
from asyncrl.trajectory import Ticket


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The outcome of an episode."""

    task_id: str
    reward: float
    rewards: Mapping[str, float]


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
    async def at(cls, url: str, model: str | None, api_key_env: str | None, timeout_s: float) -> ServedModel:
        """`model` None: the one that the endpoint lists. Raises ConfigError if it does not list exactly one, or does
        not answer."""
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
                    f"--endpoint is {url!r}, which does not list its models ({type(error).__name__}: {error}): give "
                    "the address up to and including /v1, and --served-name if it has no such list."
                ) from error
            if len(listed) != 1:
                raise ConfigError(f"--endpoint serves {', '.join(listed) or 'no model'}: choose with --served-name.")
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
    try:
        await _play(ticket, env, served, limits)
    finally:
        await env.close()
    return ChatResult(str(ticket.task["id"]), env.reward, env.rewards)


async def _play(ticket: Ticket, env: GuardedEnv, served: ServedModel, limits: EpisodeLimits) -> None:
    messages = await env.reset({**ticket.task, "episode": ticket.id.index})
    tools, total = env.tools, 0
    for turn in range(limits.max_turns):
        # A service may accept seeds of 32 bits only.
        body = {
            "messages": messages,
            "temperature": ticket.temperature,
            "top_p": limits.top_p,
            "seed": (ticket.seed + turn) % 2**31,
            "max_tokens": min(limits.max_new_tokens, limits.max_tokens - total),
        }
        try:
            reply = await served.ask(body | ({"tools": tools} if tools else {}))
        except ContextFull:
            if turn == 0:
                raise
            return  # like `env.max_tokens`: the episode ends with the reward so far
        message, sampled, total = _read(reply)
        last = turn + 1 == limits.max_turns
        step = await env.step({**message, "tokens": sampled, "last": last})
        if step.done or total >= limits.max_tokens:
            return
        if not step.messages and not last:
            raise EpisodeFailed("env_error", "environment.step returned no messages although the episode is not done")
        messages = [*messages, message, *step.messages]


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
