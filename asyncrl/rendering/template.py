"""Messages are rendered to token ids, sampled ids are parsed to messages; neither is ever reversed.

Sampled ids are never encoded again. After an assistant turn only the tail is rendered: the ids that the chat template
adds between the sampled ids and the point where the policy samples next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.data.base import Message
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer
from asyncrl.plugins import resolve
from asyncrl.rendering.tool_calls import TOOL_CALL_FORMATS

log = logging.getLogger(__name__)

ToolSchema = Mapping[str, Any]
"""One tool in OpenAI form, `Tool.schema`."""


class Renderer(Protocol):
    """The interface between the episode loop and a model's chat format."""

    stop_token_ids: tuple[int, ...]
    """Each ends the assistant's turn when sampled. It is part of the sampled ids and carries loss."""
    vocabulary: int
    """Number of ids of the tokenizer."""

    # A long conversation is rendered in a thread, while others are rendered on the event loop.

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of a whole conversation, up to the assistant's next turn. Starts a row."""
        ...

    def render_tail(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        closed: bool = True,
        row: Sequence[int] = (),
        sampled: int = 0,
    ) -> list[int] | None:
        """The ids to append to a row after the sampled ids, up to the assistant's next turn.

        `messages_before` ends with the assistant message parsed from the sampled ids. `closed`: whether these end with
        a stop token (otherwise the tail closes the turn, as context). `row`: all ids so far, of which the last
        `sampled` were sampled; for a renderer that works on ids. None: with the new messages the template changes
        earlier ids, so the row ends here and `render_initial` starts a new one.
        """
        ...

    def render_answer(
        self, messages_before: Sequence[Message], message: Message, tools: Sequence[ToolSchema]
    ) -> list[int] | None:
        """The ids that a policy would have sampled for the assistant's `message`, with the stop token that ends it.

        For demonstrations only. None: the conversation with the message does not begin with the one before it, so that
        its ids cannot be told apart.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        ...

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The assistant message in sampled ids: `content`, and `tool_calls` if there are any. Never raises."""
        ...


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering uses."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def __len__(self) -> int: ...


_MAX_TOOL_LISTS = 64
"""Lists of tools whose JSON is cached."""
_CACHED_CHARS = 1 << 17
"""Longest text that is cached: 512 of them take at most 64 MB, or four times as much if they are not ASCII."""


class TemplateRenderer:
    """Renders with a model's chat template: the tail is the difference of two rendered texts, tokenised once."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        tool_calls: str = "hermes",
        stop_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: has a chat template.
            tool_calls: how the model writes tool calls: a name in `TOOL_CALL_FORMATS`, or an import path.
            stop_token_ids: empty: the tokenizer's `eos_token_id`.
            template_options: passed to the template, e.g. `{"enable_thinking": False}`.
        Raises ConfigError when there is no stop token, or one without text, and for an unknown format.
        """
        if not stop_token_ids:
            if tokenizer.eos_token_id is None:
                raise ConfigError(
                    "the tokenizer has no eos_token; set actors.stop_token_ids to the ids that end a turn"
                )
            stop_token_ids = (tokenizer.eos_token_id,)
        self.stop_token_ids = tuple(stop_token_ids)
        self.vocabulary = len(tokenizer)
        self._tokenizer = tokenizer
        self._stops = tuple(tokenizer.decode([stop], skip_special_tokens=False) for stop in self.stop_token_ids)
        for stop, text in zip(self.stop_token_ids, self._stops, strict=True):
            if not text:
                raise ConfigError(f"actors.stop_token_ids holds {stop}, which is not a token of the model's tokenizer.")
        try:
            self._format = resolve(tool_calls, TOOL_CALL_FORMATS, "actors.tool_calls")()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._options = dict(template_options or {})
        # The episodes of a group share their beginning and often more; tool results repeat (a number, an error).
        self._cached_ids = lru_cache(maxsize=512)(self._encode)
        self._cached_text = lru_cache(maxsize=512)(self._render)
        self._read = lru_cache(maxsize=_MAX_TOOL_LISTS)(json.loads)
        self._tools: dict[tuple[int, ...], tuple[tuple[ToolSchema, ...], str]] = {}
        words: Mapping[str, int] = getattr(tokenizer, "get_vocab", dict)()
        self.longest_token = max(map(len, words), default=256)
        """Most characters that one token stands for."""

    @classmethod
    def of(cls, config: Config) -> TemplateRenderer:
        """The renderer for `model.path`. Raises ConfigError."""
        actors = config.actors
        return cls(load_tokenizer(config.model), tool_calls=actors.tool_calls, stop_token_ids=actors.stop_token_ids)

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return list(self._ids(self._text(messages, tools, generate=True)))

    def render_tail(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        closed: bool = True,
        row: Sequence[int] = (),
        sampled: int = 0,
    ) -> list[int] | None:
        try:
            base, full = self._base_and_full(messages_before, new_messages, tools)
        except Exception as error:  # a chat template may raise anything
            # The policy's message may be one that its template refuses, for instance two calls at once (Llama:
            # TemplateError), or arguments that are not JSON (Qwen3-Coder: TypeError). The tail does not depend on it.
            _warn_of_refused_message(type(error).__name__)
            plain: Message = {"role": "assistant", "content": "."}
            base, full = self._base_and_full([*messages_before[:-1], plain], new_messages, tools)
        stop = max(self._stops, key=base.rfind)
        at = base.rfind(stop)
        # Text after the turn's stop token (in Qwen's format a newline) was not sampled and belongs to the tail.
        after = at + len(stop)
        if at < 0 or base[after:].strip() or not full.startswith(base):
            return None
        return list(self._ids(full[after if closed else at :]))

    def render_answer(
        self, messages_before: Sequence[Message], message: Message, tools: Sequence[ToolSchema]
    ) -> list[int] | None:
        prompt = self._text(messages_before, tools, generate=True)
        full = self._text([*messages_before, message], tools, generate=False)
        ends = max((full.rfind(stop) + len(stop) for stop in self._stops if stop in full), default=0)
        return list(self._ids(full[len(prompt) : ends])) if full.startswith(prompt) and ends > len(prompt) else None

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        content, calls = self._format.parse(self.decode(ids))
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        return message

    def prefix_breaks(self) -> tuple[str, ...]:
        """Names of the situations in which this template is not prefix-stable; ideally ().

        Shown to the user at start-up: in each of them an episode becomes several rows, which costs tokens.
        """
        breaks = []
        for name, (before, new) in _PROBES.items():
            try:
                prompt = self._text(before[:-1], _PROBE_TOOLS, generate=True)
                unstable = (
                    not self._text(before, _PROBE_TOOLS, generate=False).startswith(prompt)
                    or self.render_tail(before, new, _PROBE_TOOLS) is None
                )
            except Exception as error:
                breaks.append(f"{name} (the template refuses it: {error})")
            else:
                if unstable:
                    breaks.append(name)
        return tuple(breaks)

    def _base_and_full(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, str]:
        first, rest, with_tools = _joined(before), _joined(new), self._tools_json(tools)
        both = ", ".join(part for part in (first, rest) if part)
        return self._rendered(first, with_tools, False), self._rendered(both, with_tools, True)

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generate: bool) -> str:
        # Messages are JSON, and as a cache key JSON costs a tenth of the rendering.
        return self._rendered(_joined(messages), self._tools_json(tools), generate)

    def _tools_json(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON. An environment's tools are the same objects in all its episodes, so their ids are the
        cache key; the cache holds the objects, so that no other object gets their ids."""
        ids = tuple(map(id, tools))
        known = self._tools.get(ids)
        if known is None:
            if len(self._tools) >= _MAX_TOOL_LISTS:
                self._tools.clear()
            known = self._tools[ids] = tuple(tools), json.dumps(list(tools))
        return known[1]

    def _ids(self, text: str) -> tuple[int, ...]:
        return self._cached_ids(text) if len(text) <= _CACHED_CHARS else self._encode(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(_utf8(text), add_special_tokens=False))

    def _rendered(self, chat: str, with_tools: str, generate: bool) -> str:
        short = len(chat) + len(with_tools) <= _CACHED_CHARS
        return (self._cached_text if short else self._render)(chat, with_tools, generate)

    def _render(self, chat: str, with_tools: str, generate: bool) -> str:
        messages, tools = json.loads(f"[{chat}]"), self._read(with_tools)
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generate, tokenize=False, **self._options
        )
        return text


def _utf8(text: str) -> str:
    """`text` with a question mark for each half surrogate pair, which JSON can hold but no tokenizer accepts."""
    return text.encode(errors="replace").decode()


def _joined(messages: Sequence[Message]) -> str:
    """The messages as JSON, without the brackets."""
    return json.dumps(list(messages))[1:-1]


@lru_cache(maxsize=64)
def _warn_of_refused_message(kind: str) -> None:
    """Warn once per kind of error: the cache remembers."""
    log.warning(
        "the chat template refuses a message of the policy (%s): only the messages behind it are rendered, and the "
        "sampled tokens stay as they are (this warning comes once for each kind of error)", kind,
    )  # fmt: skip


@lru_cache(maxsize=64)
def warn_of_prefix_break(role: str) -> None:
    """Warn once per role: the cache remembers."""
    log.warning(
        "the chat template changed the tokens before a %s message: the row ends there and a new one starts with the "
        "whole conversation, each time (throughput/prefix_breaks counts them; this warning comes once)", role,
    )  # fmt: skip


_CALL = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {"x": 1}}}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "1"}
_USER = {"role": "user", "content": "Go on."}
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]


def _assistant(content: str, calls: int = 0) -> Message:
    return {"role": "assistant", "content": content} | ({"tool_calls": [_CALL] * calls} if calls else {})


_PROBES: dict[str, tuple[list[Message], list[Message]]] = {
    "tool result": ([_USER, _assistant("", 1)], [_RESULT]),
    "several tool results": ([_USER, _assistant("", 2)], [_RESULT, _RESULT]),
    "second tool result": ([_USER, _assistant("", 1), _RESULT, _assistant("", 1)], [_RESULT]),
    "user message": ([_USER, _assistant("Yes.")], [_USER]),
    "tool result after thinking": ([_USER, _assistant("<think>\nHm.\n</think>\n\n", 1)], [_RESULT]),
    "user message after thinking": ([_USER, _assistant("<think>\nHm.\n</think>\n\nYes.")], [_USER]),
}
