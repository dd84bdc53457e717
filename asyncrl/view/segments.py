"""Where the parts of a conversation begin in the text of a row: roles, tool calls, thinking. Pure.

A row holds tokens, not messages: what the policy sampled is known for every token, the rest is told by the marks that
chat formats write. A text without a known mark is one part, and nothing is lost: parts only say what to fold and how to
name it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ROLE = re.compile(
    r"<\|im_start\|>(?P<chatml>\w{1,32})\n?|<\|start_header_id\|>(?P<llama>\w{1,32})<\|end_header_id\|>|"
    r"<start_of_turn>(?P<gemma>\w{1,32})\n?|<\|(?P<plain>system|user|assistant|tool|observation)\|>|"
    r"\[(?P<mistral>INST|TOOL_RESULTS|SYSTEM_PROMPT|AVAILABLE_TOOLS)\]"
)
_NAMES = {
    "INST": "user", "TOOL_RESULTS": "tool", "SYSTEM_PROMPT": "system", "AVAILABLE_TOOLS": "system", "ipython": "tool",
    "observation": "tool", "model": "assistant", "developer": "system",
}  # fmt: skip
_RESULT = re.compile(r"\s*<tool_response>")
_INSIDE = re.compile(
    r"(?P<call><tool_call>.*?(?:</tool_call>|\Z)|<\|python_tag\|>.*|\[TOOL_CALLS\].*)|"
    r"(?P<think><think>.*?(?:</think>|\Z))",
    re.DOTALL,
)
_CALLED = re.compile(r'"name"\s*:\s*"([^"\\]{1,80})"|\[TOOL_CALLS\]\s*([\w.-]{1,80})\[?')
_FOLDED = ("system", "tool", "call", "think")


@dataclass(frozen=True, slots=True)
class Segment:
    kind: str
    """policy, call, think: sampled; system, user, tool, assistant, context: not sampled."""
    title: str
    start: int
    """First token."""
    end: int
    """Behind the last token."""
    turn: int
    """Number of the policy's turn that it belongs to or follows, from 1; 0 before the first."""

    @property
    def folded(self) -> bool:
        return self.kind in _FOLDED


def segments(pieces: Sequence[str], sampled: Sequence[bool]) -> list[Segment]:
    """The parts of a row, in order, without gaps.

    >>> [(s.kind, s.start, s.end) for s in segments(["<|im_start|>user", "\\n", "2+2?", "4"], [False] * 3 + [True])]
    [('user', 0, 3), ('policy', 3, 4)]
    """
    found: list[Segment] = []
    at, turn = 0, 0
    for by_policy, run in itertools.groupby(sampled):
        end = at + len(list(run))
        turn += by_policy
        text = "".join(pieces[at:end])
        parts = list(_sampled(text) if by_policy else _given(text))
        found += _on_tokens(parts, pieces, at, end, turn)
        at = end
    return found


Part = tuple[int, str, str]
"""First character, kind and title of a part."""


def _given(text: str) -> Iterator[Part]:
    """The parts of what was not sampled."""
    marks = list(_ROLE.finditer(text))
    if not marks or marks[0].start() > 0:
        kind = "tool" if _RESULT.match(text) else "context"
        yield 0, kind, ""
    for mark in marks:
        role = next(value for value in mark.groups() if value)
        role = _NAMES.get(role, role)
        kind = role if role in ("system", "user", "tool", "assistant") else "context"
        if kind == "user" and _RESULT.match(text, mark.end()):
            kind = "tool"
        yield mark.start(), kind, role


def _sampled(text: str) -> Iterator[Part]:
    """The parts of what the policy sampled in one turn."""
    at = 0
    for mark in _INSIDE.finditer(text):
        if mark.start() > at or not mark.start():
            yield from [(at, "policy", "")] if mark.start() > at else []
        call = mark["call"]
        name = _CALLED.search(call[:4096]) if call else None
        yield mark.start(), "call" if call else "think", next(filter(None, name.groups()), "") if name else ""
        at = mark.end()
    if at < len(text) or not text:
        yield at, "policy", ""


def _on_tokens(parts: Sequence[Part], pieces: Sequence[str], start: int, end: int, turn: int) -> Iterator[Segment]:
    """Each part from the token that holds its first character on; one without a token of its own is left out."""
    characters = list(itertools.accumulate(map(len, pieces[start:end]), initial=0))
    begins, token = [], 0
    for first, _, _ in parts:
        while token + 1 < end - start and characters[token + 1] <= first:
            token += 1
        begins.append(start + token)
    begins[0] = start
    for (_, kind, title), at, until in zip(parts, begins, [*begins[1:], end], strict=True):
        if at < until:
            yield Segment(kind, title, at, until, turn)
