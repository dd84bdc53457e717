"""Scores that compare a final answer with the task's: numbers, letters, words, JSON. Each is one function."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_TAIL = 300
"""Search only the last N characters, as verl does, so that a long text cannot match by chance."""
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> dict[str, float]:
    """1 if the number after the last `####` is the truth's; `flexible`: the last number of the text. As in verl.

    `ground_truth`: the number, or gsm8k's whole answer ending in `#### 72`. Metric `answered`: a number was found.
    """
    truth = _number(str(ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth {ground_truth!r} is not a number")
    tail = solution_str[-_TAIL:]
    matches = re.findall(rf"####\s*({_NUMBER})" if method == "strict" else f"({_NUMBER})", tail)
    answer = _number(matches[-1]) if matches else None
    return {"score": float(answer == truth), "answered": float(answer is not None)}


def multiple_choice(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    letters: str = "ABCDEFGHIJ",
) -> dict[str, float]:
    """1 if the letter that the text settles on is the correct one.

    Looked for in this order, the last of each: `\\boxed{B}`, `answer is (B)` or `Answer: B`, a text that is nothing but
    the letter. Metric `answered`: a letter was found.
    """
    either = f"{letters}{letters.lower()}"
    # In "the answer is a prime" and "the answer is I think B", a and I are words, not letters, unless they stand alone.
    one = f"[({{]?\\s*([{either}])\\b(?!(?<=[I{letters.lower()}])\\s+\\w)"
    tail = solution_str[-_TAIL:].replace("*", "")
    for pattern in (r"\\boxed\{(?:\\text\{)?\s*\(?" + f"([{letters}])", rf"(?i:answer)\s*(?i:is)?\s*:?\s*{one}"):
        if matches := re.findall(pattern, tail):
            break
    else:
        matches = re.findall(rf"^\s*\(?([{letters}])\)?\s*[.:]?\s*$", tail, re.MULTILINE)
    answer = matches[-1].upper() if matches else None
    return {"score": float(answer == str(ground_truth).strip(" ().").upper()), "answered": float(answer is not None)}


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tag: str | None = None,
) -> float:
    """1 if the text is one of the true answers, case, articles, punctuation and spaces aside (SQuAD).

    `ground_truth`: a text or a list of texts. `tag`: only what stands in the last `<tag>...</tag>` counts.
    """
    answer = _normal(_tagged(solution_str, tag))
    return float(any(answer == _normal(truth) for truth in _truths(ground_truth)))


def f1(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tag: str | None = None,
) -> float:
    """Largest overlap in words with a true answer (SQuAD's F1), 0 to 1; normalised as in `exact_match`."""
    answer = _normal(_tagged(solution_str, tag)).split()
    return max(_overlap(answer, _normal(truth).split()) for truth in _truths(ground_truth))


def json_schema(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    schema: dict[str, Any] | None = None,
) -> dict[str, float]:
    """1 if the text's last fenced block, or the whole text, is JSON that the schema allows. Metric `parsed`.

    `schema`: for all tasks; else `ground_truth` is the task's, as a mapping or as JSON.
    """
    import jsonschema

    wanted = schema if schema is not None else ground_truth
    wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    validator = jsonschema.validators.validator_for(wanted)
    validator.check_schema(wanted)
    try:
        value = json.loads(fenced(solution_str) or solution_str)
    except (ValueError, RecursionError):
        return {"score": 0.0, "parsed": 0.0}
    return {"score": float(validator(wanted).is_valid(value)), "parsed": 1.0}


def fenced(text: str) -> str | None:
    """The contents of the last block fenced by three backticks, or None.

    >>> fenced("So: ```json\\n{}\\n```")
    '{}\\n'
    """
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    return str(blocks[-1]) if blocks else None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None


def _truths(ground_truth: Any) -> list[str]:
    if isinstance(ground_truth, Mapping):  # verl's search rows: {"target": [...]}
        ground_truth = ground_truth["target"]
    several = isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str)
    truths = ground_truth if several else [ground_truth]
    if not truths or any(truth is None for truth in truths):
        raise ValueError(f"the ground truth is {ground_truth!r}: expected a text or a list of texts")
    return [str(truth) for truth in truths]


def _tagged(text: str, tag: str | None) -> str:
    if tag is None:
        return text
    matches = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return str(matches[-1]) if matches else ""


def _normal(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def _overlap(answer: list[str], truth: list[str]) -> float:
    if not answer or not truth:
        return float(answer == truth)
    same = sum((Counter(answer) & Counter(truth)).values())
    return 2 * same / (len(answer) + len(truth))
