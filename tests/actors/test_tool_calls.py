import json

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.actors.tool_calls import Hermes, arguments_of

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
    assert [call["id"] for call in calls] == ["call_0", "call_1"]


def test_text_without_calls_is_kept_as_it_is():
    assert Hermes().parse(" 42\n") == (" 42\n", [])


def test_what_cannot_be_read_stays_visible():
    for body in ("{oops", '{"arguments": {}}', "3", '{"name": 3}'):
        _, (call,) = Hermes().parse(f"<tool_call>{body}</tool_call>")
        assert call["function"] == {"name": "", "arguments": body}
    _, (call,) = Hermes().parse('<tool_call>{"name": "a", "arguments": [1]}')
    assert call["function"] == {"name": "a", "arguments": "[1]"}
    assert arguments_of(call) is None
