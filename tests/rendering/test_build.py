from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering import template
from asyncrl.rendering.build import BridgedRenderer, build_renderer
from asyncrl.rendering.template import TemplateRenderer

TOKENIZER = build_tokenizer()
TEMPLATE = TemplateRenderer(TOKENIZER)
(STOP,) = TEMPLATE.stop_token_ids
USER = {"role": "user", "content": "ant"}


class FakeFamily:
    """A fake of what the package `renderers` gives: it bridges tool results, and nothing else."""

    def __init__(self, tokenizer: Any) -> None:
        self.tools: Any = None

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        self.tools = tools
        return [len(m["content"]) for m in messages] + [1] * add_generation_prompt

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        if new[0]["role"] != "tool":
            return None
        close = [] if completion[-1] == STOP else [STOP]
        return type("Rendered", (), {"token_ids": [*prompt, *completion, *close, 41, 1]})

    def parse_response(self, ids: list[int]) -> Any:
        good = type("Call", (), {"id": None, "name": "lookup", "arguments": {"key": "fox"}, "raw": "..."})
        bad = type("Call", (), {"id": None, "name": None, "arguments": None, "raw": "{oops"})
        return type("Parsed", (), {"content": None, "reasoning_content": "Hm.", "tool_calls": [good, bad]})


class NoRenderer:
    def __init__(self, tokenizer: Any) -> None: ...


def test_a_renderer_of_the_package_is_used_as_it_is() -> None:
    renderer = build_renderer(Config(actors={"renderer": f"{__name__}:FakeFamily"}))
    assert isinstance(renderer, BridgedRenderer)
    assert renderer.stop_token_ids == (STOP,)
    tool = {"type": "function", "function": {"name": "lookup"}}
    assert renderer.render_initial([USER], [tool]) == [3, 1]
    assert renderer._inner.tools == [{"name": "lookup"}]
    tail = {"row": [3, 1, 50, STOP], "sampled": 2}
    result = {"role": "tool", "content": "41"}
    assert renderer.render_tail([], [result], [], **tail) == [41, 1]
    assert renderer.render_tail([], [result], [], closed=False, row=[3, 1, 50], sampled=1) == [STOP, 41, 1]
    assert renderer.render_tail([], [USER], [], **tail) is None
    message = renderer.parse([50, STOP])
    assert (message["content"], message["reasoning_content"]) == ("", "Hm.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "lookup", "arguments": {"key": "fox"}}, {"name": "", "arguments": "{oops"}]
    assert renderer.decode(TOKENIZER.encode("fox", add_special_tokens=False)) == "fox"


def test_what_is_no_renderer_is_refused() -> None:
    with pytest.raises(ConfigError, match="without render_initial, render_tail, parse, decode"):
        build_renderer(Config(actors={"renderer": f"{__name__}:NoRenderer"}))
    with pytest.raises(ConfigError, match=r"actors\.renderer.*'templat'"):
        build_renderer(Config(actors={"renderer": "templat"}))
    assert isinstance(build_renderer(Config()), TemplateRenderer)


SINGLE_CALLS = """\
{%- for m in messages %}{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at once') }}\
{%- endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_what_the_template_cannot_write_is_still_followed_by_its_tail(caplog: pytest.LogCaptureFixture) -> None:
    template._warn_of_refused_message.cache_clear()
    tokenizer = build_tokenizer()
    tokenizer.chat_template = SINGLE_CALLS
    call = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    renderer = TemplateRenderer(tokenizer)
    for _ in range(2):
        tail = renderer.render_tail([USER, said], [{"role": "tool", "content": "41"}], [])
    assert tail is not None
    assert caplog.text.count("refuses a message of the policy (TemplateError)") == 1
    assert TOKENIZER.decode(tail) == "\n<|im_start|>tool\n41<|im_end|>\n<|im_start|>assistant\n"
