from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.view.segments import segments

PARTS = ["<|im_start|>", "user\n", "<tool_call>", '{"name": "f"}', "</tool_call>", "<think>", "</think>", "[INST]", "x",
         "", "<tool_response>", "<|start_header_id|>tool<|end_header_id|>", "[TOOL_CALLS]f[ARGS]{}"]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.booleans()), max_size=30))
def test_the_parts_have_every_token_once_and_in_order(tokens: list[tuple[str, bool]]) -> None:
    pieces, sampled = [piece for piece, _ in tokens], [policy for _, policy in tokens]
    found = segments(pieces, sampled)
    assert [place for s in found for place in range(s.start, s.end)] == list(range(len(pieces)))
    for s in found:
        assert len(set(sampled[s.start : s.end])) == 1, "no part has tokens of both kinds"
        assert (s.kind in ("policy", "call", "think")) == sampled[s.start]


@pytest.mark.parametrize(
    ("pieces", "policy", "kinds"),
    [
        (["<|im_start|>system\nBe kind.", "<|im_start|>user\n2+2?"], "00", ["system", "user"]),
        (["[INST]2+2?[/INST]", "4"], "01", ["user", "policy"]),
        (["<|start_header_id|>ipython<|end_header_id|>\n\n4"], "0", ["tool"]),
        (["<start_of_turn>model\n", "4"], "01", ["assistant", "policy"]),
        (["<|im_start|>user\n<tool_response>4</tool_response>"], "0", ["tool"]),
        (["<think>", "so", "</think>", "well", "<tool_call>", '{"name": "add"}', "</tool_call>"], "1111111",
         ["think", "policy", "call"]),
        (["no", " marks"], "00", ["context"]),
        (["<tool_call>", "cut off"], "11", ["call"]),
    ],
)  # fmt: skip
def test_known_marks_name_the_parts(pieces: list[str], policy: str, kinds: list[str]) -> None:
    assert [s.kind for s in segments(pieces, [p == "1" for p in policy])] == kinds


def test_a_call_is_named_and_turns_are_counted() -> None:
    found = segments(["q", '<tool_call>{"name": "add"', "}</tool_call>", "r", "4"], [False, True, True, False, True])
    assert [(s.kind, s.title, s.turn, s.folded) for s in found] == [
        ("context", "", 0, False), ("call", "add", 1, True), ("context", "", 1, False), ("policy", "", 2, False),
    ]  # fmt: skip
