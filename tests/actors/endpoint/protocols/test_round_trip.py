"""A reply that comes back in a later request is the message that was sampled, in every protocol, whatever it holds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.actors.endpoint.protocols import PROTOCOLS
from asyncrl.actors.endpoint.protocols.protocol import Protocol
from asyncrl.actors.endpoint.replies import Choice, Reply, TurnCost, chat_json
from asyncrl.actors.endpoint.requests import plain
from asyncrl.actors.engines.protocol import Generation
from tests.actors.endpoint.playing import RENDERER, encode, text_of

PIECES = [
    '<tool_call>{"name": "lookup", "arguments": {"key": "fox"}}</tool_call>',
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "lookup", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "lookup", "arguments": ["\\ud800"]}</tool_call>',
    "<tool_call>{oops",
    "<think>\nHm.\n</think>\n\n82",
    " 82\n",
    "",
]
OUTPUTS = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8), max_size=4
)
USER = {"role": "user", "content": "fox"}


def reply_of(protocol: Protocol, ids: list[int], thought: str) -> tuple[Any, Any]:
    """(the sampled message, the protocol's reply)"""
    message = RENDERER.parse(ids) | ({"reasoning_content": thought} if thought else {})
    zeros = np.zeros(len(ids), np.int32)
    generation = Generation(np.array(ids, np.int32), zeros.astype(np.float32), zeros, "stop")
    asked = protocol.read(json.dumps({"model": "p", "max_tokens": 9, "messages": [USER], "input": [USER]}).encode(), {})
    reply = Reply([1], [Choice(generation, message, "stop", TurnCost(generation, 0.0))])
    head = {"id": "chatcmpl-1", "created": 1, "model": "p", "system_fingerprint": "policy-version-0"}
    answer = protocol.answer(asked, chat_json(asked.chat, head, reply, text_of))
    assert protocol.events(asked, json.loads(json.dumps(answer)))
    return message, answer


def sent_back(protocol: Protocol, answer: Any) -> Any:
    """The messages of a request that holds the reply and one more message."""
    if "choices" in answer:
        body = {"messages": [USER, answer["choices"][0]["message"], USER]}
    elif "output" in answer:
        body = {"input": [USER, *answer["output"], USER]}
    else:
        body = {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": answer["content"]}, USER]}
    return protocol.read(json.dumps({"model": "p"} | body).encode(), {}).chat.messages


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.paths[0])
@given(pieces=OUTPUTS, thought=st.sampled_from(["", "Hm."]))
def test_a_reply_that_comes_back_is_the_message_that_was_sampled(
    protocol: Protocol, pieces: list[str], thought: str
) -> None:
    message, answer = reply_of(protocol, encode("".join(pieces)), thought)
    assert sent_back(protocol, answer) == [USER, plain(message), USER]
