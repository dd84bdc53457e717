import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering.template import TemplateRenderer

TOKENIZER = build_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "", "parameters": {}}}]
USER = {"role": "user", "content": "What is fox + owl?"}
RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "lookup", "content": "41"}
# As in Qwen 3: earlier thinking is left out once the user speaks again.
FORGETS_THINKING = """\
{%- set ns = namespace(user=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.user = loop.index0 %}\
{%- endif %}{%- endfor %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{{- m.content.split('</think>')[-1].lstrip('\\n') if loop.index0 < ns.user else m.content }}\
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def with_template(template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return TemplateRenderer(tokenizer)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def decode(ids):
    return TOKENIZER.decode(ids)


CALL = encode('<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call><|im_end|>')


def test_a_row_built_from_tails_is_the_whole_conversation_rendered():
    renderer = TemplateRenderer(TOKENIZER)
    messages = [USER]
    row = renderer.render_initial(messages, TOOLS)
    for said in (CALL, CALL, encode("82<|im_end|>")):
        row += said
        messages.append(renderer.parse(said))
        if messages[-1].get("tool_calls"):
            row += renderer.render_tail(messages, [RESULT], TOOLS)
            messages.append(RESULT)
    whole = TOKENIZER.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert decode(row) + "\n" == whole
    assert row + encode("\n") == encode(whole)


def test_a_turn_that_was_cut_off_is_closed_by_the_tail():
    renderer = TemplateRenderer(TOKENIZER)
    cut = CALL[:-1]
    messages = [USER, renderer.parse(cut)]
    closed = renderer.render_tail(messages, [RESULT], TOOLS)
    assert renderer.render_tail(messages, [RESULT], TOOLS, closed=False) == [renderer.stop_token_ids[0], *closed]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_whatever_was_sampled_is_parsed_and_followed_by_the_same_tail(sampled):
    renderer = TemplateRenderer(TOKENIZER)
    stop = renderer.stop_token_ids[0]
    sampled = [token for token in sampled if token != stop] + [stop]
    message = renderer.parse(sampled)
    assert message["role"] == "assistant"
    expected = encode("\n<|im_start|>tool\n41<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.render_tail([USER, message], [RESULT], TOOLS) == expected


NAMES_ARGUMENTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{%- for call in m.tool_calls or [] %}\
{%- for name, value in call.function.arguments|items %}{{ name }}={{ value }}{%- endfor %}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_arguments_that_are_no_json_are_followed_by_the_same_tail():
    """`items` of a text is a TypeError of jinja, not a TemplateError: templates of Qwen3-Coder and others."""
    renderer = with_template(NAMES_ARGUMENTS)
    assert renderer.prefix_breaks() == ()
    tails = []
    for said in ('{"name": "lookup", "arguments": {"key": "fox"}}', '{"name": "lookup", oops'):
        message = renderer.parse(encode(f"<tool_call>{said}</tool_call><|im_end|>"))
        tails.append(renderer.render_tail([USER, message], [RESULT], []))
    assert tails[0] == tails[1] == encode("\n<|im_start|>tool\n41<|im_end|>\n<|im_start|>assistant\n")


def test_half_a_surrogate_pair_is_rendered_as_a_question_mark():
    """JSON can say it, so a policy can, and a tool that repeats it."""
    renderer = TemplateRenderer(TOKENIZER)
    message = renderer.parse(encode('<tool_call>{"name": "lookup", "arguments": {"key": "\\ud800"}}</tool_call>'))
    tails = [
        renderer.render_tail([USER, message], [RESULT | {"content": f"no key {key}"}], TOOLS) for key in ("\ud800", "?")
    ]
    assert tails[0] == tails[1]


def test_parse_keeps_the_text_around_calls_and_drops_the_stop_token():
    renderer = TemplateRenderer(TOKENIZER)
    assert renderer.parse(encode("82<|im_end|>")) == {"role": "assistant", "content": "82"}
    assert renderer.parse([]) == {"role": "assistant", "content": ""}
    message = renderer.parse(CALL)
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"key": "fox"}}


def test_the_quickstart_template_is_prefix_stable():
    assert TemplateRenderer(TOKENIZER).prefix_breaks() == ()


def test_a_template_that_forgets_thinking_is_reported_and_starts_a_new_row():
    renderer = with_template(FORGETS_THINKING)
    assert renderer.prefix_breaks() == ("user message after thinking",)
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n82"}
    assert renderer.render_tail([USER, thought], [USER], []) is None
    assert renderer.render_tail([USER, thought], [RESULT], []) is not None
    assert renderer.render_tail([USER, {"role": "assistant", "content": "82"}], [USER], []) is not None


def test_a_template_that_refuses_tools_is_reported():
    template = "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}"
    template += "{{ m.role + '\\n' + m.content }}<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}assistant\n"
    breaks = with_template(template + "{%- endif %}").prefix_breaks()
    assert "tool result (the template refuses it: no tools here)" in breaks
    assert "user message" not in breaks


def test_a_template_without_a_turn_end_has_no_tail():
    renderer = with_template("{%- for m in messages %}{{ m.role + ': ' + m.content }}\n{%- endfor %}")
    assert renderer.render_tail([USER, {"role": "assistant", "content": "82"}], [USER], []) is None
    assert len(renderer.prefix_breaks()) == 6


def test_stop_tokens_are_required():
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        TemplateRenderer(tokenizer)
    assert TemplateRenderer(tokenizer, stop_token_ids=[2]).stop_token_ids == (2,)


class AngleCalls:
    """Another family's format: `<<name>>`."""

    def parse(self, text):
        name = text.removeprefix("<<").removesuffix(">>")
        return "", [{"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}]

    def write(self, name, arguments):
        return f"<<{name}>>"


def configured(**actors):
    return TemplateRenderer.of(Config.model_validate({"actors": actors}))


def test_the_config_says_what_ends_a_turn_and_how_tools_are_called():
    assert configured().stop_token_ids == (TOKENIZER.eos_token_id,)
    comma = encode(",")
    renderer = configured(tool_calls=f"{__name__}:AngleCalls", stop_token_ids=[TOKENIZER.eos_token_id, *comma])
    assert renderer.stop_token_ids == (TOKENIZER.eos_token_id, *comma)
    message = renderer.parse(encode("<<lookup>>") + comma)
    assert message["tool_calls"][0]["function"]["name"] == "lookup"


def test_a_stop_token_or_a_format_that_is_not_there_is_refused_by_its_field():
    with pytest.raises(ConfigError, match=r"actors\.stop_token_ids holds 999999"):
        configured(stop_token_ids=[999999])
    with pytest.raises(ConfigError, match=r"actors\.tool_calls: 'hermez'.*'hermes'"):
        configured(tool_calls="hermez")
