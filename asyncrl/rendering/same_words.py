"""Refuses a teacher whose words or chat template are not the policy's: it would score other text than the policy wrote.

Pure, but for the tokenizers that it calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from asyncrl.errors import ConfigError

SHOWN = 3
"""Differing tokens that a sentence names."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
_PLAIN: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And twice that?"},
)
_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
_WITH_TOOLS: Sequence[Mapping[str, Any]] = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Look up a."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "look_up", "content": "7"},
)


class Tokenizer(Protocol):
    chat_template: Any

    def __len__(self) -> int: ...
    def get_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def tokenize(self, text: str) -> list[str]: ...


def refuse_other_words(policy: Tokenizer, teacher: Tokenizer, path: str, words: int) -> None:
    """`path`: of the teacher; `words`: that its head knows. Raises ConfigError, naming tokens that differ."""
    where = f"learner.teacher.path is {path!r}"
    if different := _different(policy.get_vocab(), teacher.get_vocab()):
        raise ConfigError(
            f"{where}, a teacher of another vocabulary than model.path: {different}. Choose a teacher that was trained "
            "with the policy's tokenizer."
        )
    if words < len(policy):
        raise ConfigError(
            f"{where}, whose head knows {words} words while the tokenizer has {len(policy)}: choose a teacher whose "
            "embeddings were resized with its tokenizer."
        )
    for conversation, tools in ((_PLAIN, None), (_WITH_TOOLS, [_TOOL])):
        mine, theirs = (_rendered(t, conversation, tools) for t in (policy, teacher))
        if mine != theirs:
            raise ConfigError(
                f"{where}, a teacher of another chat template than model.path: {_first_difference(mine, theirs)}. "
                "Choose a teacher of the same template; if its weights know the policy's, copy the tokenizer's files "
                "of model.path into a copy of its folder."
            )


def _different(policy: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Which tokens have another number, the lowest first; empty: none.

    >>> _different({"a": 0, "b": 1}, {"a": 0, "b": 2, "c": 1})
    "'b' is 1 there and 2 in the teacher, 'c' is missing there and 1 in the teacher"
    """
    tokens = [t for t in policy.keys() | teacher.keys() if policy.get(t) != teacher.get(t)]
    tokens.sort(key=lambda t: (min(policy.get(t, len(policy)), teacher.get(t, len(teacher))), t))
    named = [
        f"{t!r} is {policy.get(t, 'missing')} there and {teacher.get(t, 'missing')} in the teacher"
        for t in tokens[:SHOWN]
    ]
    more = len(tokens) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _rendered(tokenizer: Tokenizer, conversation: Sequence[Mapping[str, Any]], tools: Any) -> list[str]:
    """Tokens of the conversation; what the template raises where it cannot render it."""
    if not tokenizer.chat_template:
        return ["(no chat template)"]
    try:
        text: str = tokenizer.apply_chat_template(
            list(conversation), tools=tools, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template is a program of its author, which may raise anything
        return [f"({type(error).__name__})"]
    return tokenizer.tokenize(text)


def _first_difference(policy: Sequence[str], teacher: Sequence[str]) -> str:
    """The first tokens that differ, with their place.

    >>> _first_difference(["<s>", "a", "b"], ["<s>", "b"])
    "token 2 of a rendered conversation is 'a' there and 'b' in the teacher"
    """
    pairs = zip_longest(policy, teacher, fillvalue="(the end)")
    place, (mine, theirs) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"token {place} of a rendered conversation is {mine!r} there and {theirs!r} in the teacher"
