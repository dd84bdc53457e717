import json
import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rendering.tool_calls import TOOL_CALL_FORMATS, Hermes, LlamaJson, Mistral, Pythonic, arguments_of

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(name=st.text(min_size=1), arguments=st.dictionaries(st.text(), values, max_size=4))
def test_what_is_written_is_read_back(name, arguments):
    text = Hermes().write(name, arguments)
    if "</tool_call>" in json.dumps([name, arguments], ensure_ascii=False):
        return
    content, (call,) = Hermes().parse(text)
    assert content == ""
    assert call["function"] == {"name": name, "arguments": arguments}


@given(st.text() | st.text(alphabet='<tool_call>/{}"name: argument,').map(lambda s: "<tool_call>" + s))
def test_no_text_makes_it_raise(text):
    content, calls = Hermes().parse(text)
    assert isinstance(content, str)
    for call in calls:
        assert isinstance(call["function"]["name"], str)
        assert arguments_of(call) is None or isinstance(arguments_of(call), dict)


def test_several_calls_and_text_around_them():
    one, two = Hermes().write("a", {"x": 1}), Hermes().write("b", {})
    content, calls = Hermes().parse(f"Let me see.\n{one}\n{two}\n")
    assert content == "Let me see."
    assert [call["function"]["name"] for call in calls] == ["a", "b"]
    assert [call["id"] for call in calls] == ["call00000", "call00001"]


def test_a_policy_that_repeats_itself_costs_no_more_than_its_length():
    """Where the time grows with the square of the length, this takes minutes."""
    spaces = "{" + " " * 100_000 + "x"
    for text in (f"<tool_call>{spaces}", "<tool_call>" * 10_000, "[TOOL_CALLS]" * 10_000):
        for family in TOOL_CALL_FORMATS.values():
            family().parse(text)
    assert Hermes().parse(f"<tool_call>{spaces}")[1][0]["function"] == {"name": "", "arguments": spaces}


def test_arguments_of_any_depth_are_read_or_left_as_text():
    """Close to the depth that Python's stack allows, what can be read cannot always be written."""
    for depth in (3, *range(900, 1010)):
        nested = "[" * depth + "]" * depth
        for call in (f'<tool_call>{{"name": "a", "arguments": {{"x": {nested}}}}}</tool_call>',
                     f'[TOOL_CALLS][{{"name": "a", "arguments": {nested}}}]', f"[a(x={nested})]"):  # fmt: skip
            for family in TOOL_CALL_FORMATS.values():
                for found in family().parse(call)[1]:
                    json.dumps(found)
    assert Hermes().parse(f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * 90 + "]" * 90}}}}}')[1][0]["function"][
        "name"
    ]


@pytest.mark.parametrize("family", sorted(TOOL_CALL_FORMATS))
def test_half_a_surrogate_pair_is_a_question_mark(family):
    text = TOOL_CALL_FORMATS[family]().write("add", {"a": ["PLACE", "\U0001f98a"]}).replace("PLACE", r"\ud83e")
    (call,) = TOOL_CALL_FORMATS[family]().parse(text)[1]
    assert call["function"] == {"name": "add", "arguments": {"a": ["?", "\U0001f98a"]}}


def test_text_without_calls_is_kept_as_it_is():
    assert Hermes().parse(" 42\n") == (" 42\n", [])


def test_what_cannot_be_read_stays_visible():
    for body in ("{oops", '{"arguments": {}}', "3", '{"name": 3}'):
        _, (call,) = Hermes().parse(f"<tool_call>{body}</tool_call>")
        assert call["function"] == {"name": "", "arguments": body}
    _, (call,) = Hermes().parse('<tool_call>{"name": "a", "arguments": [1]}')
    assert call["function"] == {"name": "a", "arguments": "[1]"}
    assert arguments_of(call) is None


names = st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda s: not keyword.iskeyword(s))
plain = st.dictionaries(names, values, max_size=4)


@pytest.mark.parametrize("family", sorted(TOOL_CALL_FORMATS))
@given(name=names.filter(lambda s: s not in ("true", "false", "null")), arguments=plain)
def test_every_family_reads_what_it_writes(family, name, arguments):
    text = TOOL_CALL_FORMATS[family]().write(name, arguments)
    if any(mark in text[1:] for mark in ("</tool_call>", "[TOOL_CALLS]", "<|python_")):
        return
    content, (call,) = TOOL_CALL_FORMATS[family]().parse(text)
    assert content == ""
    assert call["function"] == {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("family", "opening"),
    [
        ("llama", "<|python_tag|>"),
        ("llama", '{"name": "a", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]"),
        ("pythonic", "[f("),
    ],
)
@given(text=st.text() | st.text(alphabet="[]{}()<>|\"':;,=a1 "))
def test_no_text_makes_a_family_raise(family, opening, text):
    for said in (text, opening + text):
        content, calls = TOOL_CALL_FORMATS[family]().parse(said)
        assert isinstance(content, str)
        assert calls or content == said
        for call in calls:
            assert isinstance(call["function"]["name"], str)
            assert arguments_of(call) is None or isinstance(arguments_of(call), dict)
            json.dumps(call)


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (LlamaJson(), 'See.<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "arguments": {}}',
         ("See.", [("a", {"x": 1}), ("b", {})])),
        (LlamaJson(), '{"name": "a", "parameters": {"x": "{"}}', ("", [("a", {"x": "{"})])),
        (LlamaJson(), '{"name": "a", "parameters": {}} oops', ("", [("a", {}), ("", "oops")])),
        (LlamaJson(), '<|python_tag|>{"name": "a", "param', ("", [("", '{"name": "a", "param')])),
        (LlamaJson(), '{"answer": 4}', ('{"answer": 4}', [])),
        (Pythonic(), "[a(x=1, y=[true, None]), m.b()]", ("", [("a", {"x": 1, "y": [True, None]}), ("m.b", {})])),
        (Pythonic(), "<|python_start|>[a(x='1')]<|python_end|>", ("", [("a", {"x": "1"})])),
        (Pythonic(), "[a(x=open('f'))]", ("", [("", "[a(x=open('f'))]")])),
        (Pythonic(), "[a(1)]", ("", [("", "[a(1)]")])),
        (Pythonic(), "[a(x=1", ("", [("", "[a(x=1")])),
        (Pythonic(), "[f(x)] is the answer.", ("[f(x)] is the answer.", [])),
        (Mistral(), 'Hm.[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}, {"name": "b"}]',
         ("Hm.", [("a", {"x": 1}), ("b", {})])),
        (Mistral(), '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b{}', ("", [("a", {"x": 1}), ("b", {})])),
        (Mistral(), '[TOOL_CALLS]a[ARGS]{"x":', ("", [("a", '{"x":')])),
        (Mistral(), "[TOOL_CALLS]a", ("", [("", "a")])),
    ],
)  # fmt: skip
def test_calls_of_the_families(parser, text, expected):
    content, calls = parser.parse(text)
    assert (content, [(c["function"]["name"], c["function"]["arguments"]) for c in calls]) == expected


def test_an_id_that_the_model_wrote_is_kept():
    _, (call,) = Mistral().parse("[TOOL_CALLS]a[CALL_ID]aB3456789[ARGS]{}")
    assert (call["id"], call["function"]["name"]) == ("aB3456789", "a")
    assert all(len(c["id"]) == 9 for c in Hermes().parse("<tool_call>{}</tool_call>" * 3)[1])


def test_long_nonsense_takes_no_time():
    for family in TOOL_CALL_FORMATS.values():
        for text in (
            "[TOOL_CALLS]x" + " " * 20_000 + "y",
            " " * 20_000 + "[f",
            "<|python_tag|>" + "{" * 20_000,
            "[f(" + "(" * 20_000,
        ):
            family().parse(text)
