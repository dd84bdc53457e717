"""An episode played by a model behind an OpenAI-compatible endpoint: messages out and in, no tokens.

For evaluation: nothing that could be trained on comes of it. The environment and the limits are those of training.
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
class Chatted:
    """What an episode came to."""

    task_id: str
    reward: float
    rewards: Mapping[str, float]


class ContextFull(EpisodeFailed):
    """The conversation leaves the served model no room for an answer."""


_FULL = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
"""Services refuse such a request in words of their own; these are in those of OpenAI, vLLM, SGLang and llama.cpp."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and where it is asked."""

    url: str
    """Up to and with `/v1`."""
    model: str
    headers: Mapping[str, str]
    timeout_s: float
    """Of one request, which is tried again where the service is busy or away."""

    @classmethod
    async def at(cls, url: str, model: str | None, api_key_env: str | None, timeout_s: float) -> Served:
        """`model` None: the one that the endpoint lists. Raises ConfigError, with what it lists, where that is not one,
        and when nobody answers."""
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
                    "the address up to and with /v1, and --served-name if it has no such list."
                ) from error
            if len(listed) != 1:
                raise ConfigError(f"--endpoint serves {', '.join(listed) or 'no model'}: choose with --served-name.")
            model = listed[0]
        return cls(url, model, headers, timeout_s)

    async def ask(self, body: Mapping[str, Any]) -> Any:
        """The answer to a chat completion. Raises ContextFull, and EpisodeFailed for every other failure."""
        try:
            return await post(
                f"{self.url}/chat/completions", {"model": self.model, **body}, headers=self.headers,
                timeout_s=self.timeout_s,
            )  # fmt: skip
        except ServiceFailed as error:
            full = _FULL.search(str(error)) and "refused: 400" in str(error)
            raise (ContextFull if full else EpisodeFailed)("endpoint", str(error)) from error


async def chat(ticket: Ticket, make_env: Callable[[], Env], served: Served, limits: EpisodeLimits) -> Chatted:
    """Plays the episode of `ticket`. Raises EpisodeFailed: `env_error`, or `endpoint` when the endpoint does not
    answer, or not as it should."""
    env = GuardedEnv(make_env, limits.call_s)
    try:
        await _play(ticket, env, served, limits)
    finally:
        await env.close()
    return Chatted(str(ticket.task["id"]), env.reward, env.rewards)


async def _play(ticket: Ticket, env: GuardedEnv, served: Served, limits: EpisodeLimits) -> None:
    messages = await env.reset({**ticket.task, "episode": ticket.id.index})
    tools, total = env.tools, 0
    for turn in range(limits.max_turns):
        # A service may know seeds of 32 bits only.
        body = {
            "messages": messages,
            "temperature": ticket.temperature,
            "top_p": limits.top_p,
            "seed": (ticket.seed + turn) % 2**31,
            "max_tokens": min(limits.max_new_tokens, limits.max_tokens - total),
        }
        try:
            answer = await served.ask(body | ({"tools": tools} if tools else {}))
        except ContextFull:
            if turn == 0:
                raise
            return  # as `env.max_tokens` ends an episode: it counts with what it has earned
        said, sampled, total = _read(answer)
        last = turn + 1 == limits.max_turns
        step = await env.step({**said, "tokens": sampled, "last": last})
        if step.done or total >= limits.max_tokens:
            return
        if not step.messages and not last:
            raise EpisodeFailed("env_error", "environment.step returned no messages although the episode is not done")
        messages = [*messages, said, *step.messages]


def _read(answer: Any) -> tuple[Message, int | None, int]:
    """(message, tokens sampled for it, tokens of the whole conversation; as far as the endpoint counts them)."""
    try:
        found = answer["choices"][0]["message"]
        content, calls = found.get("content"), found.get("tool_calls") or []
        if not isinstance(content, str | None) or not all(isinstance(call["function"]["name"], str) for call in calls):
            raise TypeError("content is no text, or a tool call has no name")
        usage = answer.get("usage") or {}
        sampled = usage.get("completion_tokens")
        total = int(usage.get("total_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EpisodeFailed(
            "endpoint", f"the endpoint answered {answer!r:.300}: no chat completion ({error})"
        ) from error
    message: Message = {"role": "assistant", "content": content or ""}
    return message | ({"tool_calls": calls} if calls else {}), sampled, total
