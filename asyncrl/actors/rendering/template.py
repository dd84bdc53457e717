"""Between messages and token ids, in one direction each: messages are rendered, sampled ids are parsed.

Sampled ids are never encoded again. After an assistant turn only the tail is rendered: what the chat template adds
between the ids that the policy sampled and the point where it samples next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from asyncrl.actors.rendering.tool_calls import TOOL_CALL_FORMATS
from asyncrl.config import Config
from asyncrl.data.base import Message
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer
from asyncrl.plugins import resolve

log = logging.getLogger(__name__)

ToolSchema = Mapping[str, Any]
"""One tool in OpenAI form, `Tool.schema`."""


class Renderer(Protocol):
    """What the episode loop needs to know about a model's chat format."""

    stop_token_ids: tuple[int, ...]
    """A sampled id among these ends the assistant's turn. It is part of the sampled ids and carries loss."""
    vocabulary: int
    """Ids of the tokenizer: 0 to this, exclusive."""

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The ids of a whole conversation, ending where the assistant begins to speak. Starts a row."""
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
        """The ids to append to a row after the sampled ids, ending where the assistant speaks again.

        `messages_before` ends with the assistant message that was parsed from those ids; `closed` says whether they end
        with a stop token (otherwise the tail closes the turn, as context). `row`: the ids so far, of which the last
        `sampled` are those; for a renderer that goes by ids. None: with the new messages the template changes what came
        before, so the row ends here and `render_initial` starts a new one.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        ...

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """The assistant message in sampled ids: `content`, and `tool_calls` if there are any. Never raises on them."""
        ...


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering uses."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Any: ...
    def __len__(self) -> int: ...


_TOOLS_KEPT = 64
"""Lists of tools whose JSON is kept."""


class TemplateRenderer:
    """Any model with a chat template: the tail is the difference of two renderings, as text, tokenised once."""

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
            template_options: handed to the template, e.g. `{"enable_thinking": False}`.
        Raises ConfigError when there is no stop token, or one that no text ends with, and for an unknown format.
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
                raise ConfigError(f"actors.stop_token_ids holds {stop}, which is no token of the model's tokenizer.")
        try:
            self._format = resolve(tool_calls, TOOL_CALL_FORMATS, "actors.tool_calls")()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._options = dict(template_options or {})
        # The episodes of a group begin alike and often go on alike; tools often answer alike (a number, an error).
        self._ids = lru_cache(maxsize=512)(lambda text: tuple(tokenizer.encode(_utf8(text), add_special_tokens=False)))
        self._rendered = lru_cache(maxsize=512)(self._render)
        self._read = lru_cache(maxsize=_TOOLS_KEPT)(json.loads)
        self._tools: dict[tuple[int, ...], tuple[tuple[ToolSchema, ...], str]] = {}

    @classmethod
    def of(cls, config: Config) -> TemplateRenderer:
        """For `model.path`. Raises ConfigError."""
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
            base, whole = self._base_and_whole(messages_before, new_messages, tools)
        except Exception:
            # A policy may say what its template cannot write, for instance two calls at once (Llama: TemplateError), or
            # arguments that are no JSON (Qwen3-Coder: TypeError). The tail behind it does not depend on it.
            plain: Message = {"role": "assistant", "content": "."}
            base, whole = self._base_and_whole([*messages_before[:-1], plain], new_messages, tools)
        stop = max(self._stops, key=base.rfind)
        at = base.rfind(stop)
        # What follows the turn's stop token (in Qwen's format a newline) was not sampled and belongs to the tail.
        after = at + len(stop)
        if at < 0 or base[after:].strip() or not whole.startswith(base):
            return None
        return list(self._ids(whole[after if closed else at :]))

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
        """Names of the situations in which this template is not prefix-stable; () is what one wants.

        Run at start-up and shown to the user: in each of them an episode becomes several rows, which costs tokens.
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

    def _base_and_whole(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, str]:
        said, then, given = _joined(before), _joined(new), self._written(tools)
        return self._rendered(said, given, False), self._rendered(f"{said}, {then}" if said else then, given, True)

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generate: bool) -> str:
        # A chat is JSON by definition, and JSON is a key that costs a tenth of the rendering.
        return self._rendered(_joined(messages), self._written(tools), generate)

    def _written(self, tools: Sequence[ToolSchema]) -> str:
        """As JSON. An environment's tools are the same objects in all its episodes; what is kept here keeps them, so
        that no other object takes their names."""
        names = tuple(map(id, tools))
        if names not in self._tools:
            if len(self._tools) >= _TOOLS_KEPT:
                self._tools.clear()
            self._tools[names] = tuple(tools), json.dumps(list(tools))
        return self._tools[names][1]

    def _render(self, chat: str, with_tools: str, generate: bool) -> str:
        messages, tools = json.loads(f"[{chat}]"), self._read(with_tools)
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=generate, tokenize=False, **self._options
        )
        return text


def _utf8(text: str) -> str:
    """Half a surrogate pair, which JSON can write and no tokenizer takes, becomes a question mark."""
    return text.encode(errors="replace").decode()


def _joined(messages: Sequence[Message]) -> str:
    """As JSON, without the brackets."""
    return json.dumps(list(messages))[1:-1]


@lru_cache(maxsize=64)
def warn_of_prefix_break(role: str) -> None:
    """Warn once per role: the cache remembers."""
    log.warning(
        "the chat template changed what stood before a %s message: the row ends there and a new one starts with the "
        "whole conversation, each time (throughput/prefix_breaks counts them; said once)", role,
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
