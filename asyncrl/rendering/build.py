"""Builds the renderer that `actors.renderer` names: the template's, the user's, or one of the package `renderers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.data.base import Message
from asyncrl.errors import ConfigError
from asyncrl.model import load_tokenizer
from asyncrl.plugins import resolve
from asyncrl.rendering.template import Renderer, TemplateRenderer, ToolSchema


class BridgedRenderer:
    """A renderer of the package `renderers`, written for one model family, in place of a chat template."""

    def __init__(self, inner: Any, vocabulary: int, decode: Callable[[Sequence[int]], str]) -> None:
        """`inner` has `render_ids`, `bridge_to_next_turn`, `parse_response` and `get_stop_token_ids`."""
        self.stop_token_ids: tuple[int, ...] = tuple(inner.get_stop_token_ids())
        self.vocabulary = vocabulary
        self.decode = decode
        self._inner = inner

    def render_initial(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        return list(self._inner.render_ids(list(messages), tools=_functions(tools), add_generation_prompt=True))

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
        row, at = list(row), len(row) - sampled
        bridged = self._inner.bridge_to_next_turn(row[:at], row[at:], list(new_messages), tools=_functions(tools))
        if bridged is None or bridged.token_ids[: len(row)] != row:
            return None
        return list(bridged.token_ids[len(row) :])

    def render_answer(
        self, messages_before: Sequence[Message], message: Message, tools: Sequence[ToolSchema]
    ) -> list[int] | None:
        prompt = self.render_initial(messages_before, tools)
        functions, both = _functions(tools), [*messages_before, message]
        full = list(self._inner.render_ids(both, tools=functions, add_generation_prompt=False))
        ends = max((i + 1 for i, token in enumerate(full) if token in self.stop_token_ids), default=0)
        return full[len(prompt) : ends] if full[: len(prompt)] == prompt and ends > len(prompt) else None

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        parsed = self._inner.parse_response(list(sampled_ids))
        message: Message = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call{index:05d}",
                    "type": "function",
                    "function": {
                        "name": call.name or "",
                        # A call that could not be parsed is passed on as it was written.
                        "arguments": call.arguments if call.name and call.arguments is not None else call.raw,
                    },
                }
                for index, call in enumerate(parsed.tool_calls)
            ]
        return message


RENDERERS: dict[str, str] = {"template": "asyncrl.rendering.template:TemplateRenderer.of"}
"""Name -> import path of a callable `(config: Config) -> Renderer`. An import path of the config's own is called with
the tokenizer."""


def build_renderer(config: Config) -> Renderer:
    """The renderer that `actors.renderer` names. Raises ConfigError."""
    name = config.actors.renderer
    try:
        make: Callable[..., Any] = resolve(name, RENDERERS, "actors.renderer")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if name in RENDERERS:
        built: Renderer = make(config)
        return built
    own = make(load_tokenizer(config.model))
    if hasattr(own, "bridge_to_next_turn"):
        template = TemplateRenderer.of(config)
        return BridgedRenderer(own, template.vocabulary, template.decode)
    if missing := [
        method for method in ("render_initial", "render_tail", "parse", "decode") if not hasattr(own, method)
    ]:
        raise ConfigError(
            f"actors.renderer is {name!r}, which gives a {type(own).__name__} without {', '.join(missing)}: expected a "
            "Renderer (asyncrl/rendering/template.py) or one of the package `renderers`."
        )
    renderer: Renderer = own
    return renderer


def _functions(tools: Sequence[ToolSchema]) -> list[Mapping[str, Any]] | None:
    """The tools without OpenAI's envelope, as the package expects them."""
    return [tool.get("function", tool) for tool in tools] or None
