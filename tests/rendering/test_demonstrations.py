"""A demonstration has the ids of the whole chat rendered, and loss at the assistant's ids and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.data.demonstrations import chat
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering.build import BridgedRenderer
from asyncrl.rendering.demonstrations import CannotRender, rows_of
from asyncrl.rendering.template import TemplateRenderer
from tests.data.demonstrations.chats import TOOLS, called, said, turns
from tests.rendering.test_template import FORGETS_THINKING, TOKENIZER, with_template

RENDERER = TemplateRenderer(TOKENIZER)
BEGIN, END = "<|im_start|>assistant\n", "<|im_end|>"


def read(row: dict[str, Any]) -> chat.Chat:
    return chat.decoded(chat.encoded(row, "test"))


def assistants(text: str) -> list[tuple[int, int]]:
    """Slow reference: the characters of the assistant's turns, each with the token that ends it."""
    spans, at = [], text.find(BEGIN)
    while at >= 0:
        end = text.index(END, at) + len(END)
        spans.append((at + len(BEGIN), end))
        at = text.find(BEGIN, end)
    return spans


@pytest.mark.parametrize("number", [1, 2, 13, 40])
def test_ids_and_mask_are_those_of_the_whole_chat(number: int) -> None:
    row = turns(number)
    whole = TOKENIZER.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    encoded = TOKENIZER(whole, add_special_tokens=False, return_offsets_mapping=True)
    spans = assistants(whole)
    mask = [any(begin <= at < end for begin, end in spans) for at, _ in encoded["offset_mapping"]]
    (made,) = rows_of(RENDERER, read(row), None)
    assert made.ids == encoded["input_ids"][: len(made.ids)]
    assert made.mask == mask[: len(made.ids)]
    # Behind the last answer there is what the template writes after every message, and no loss.
    assert (whole[-1], sum(mask)) == ("\n", sum(made.mask))
    assert len(spans) == sum(now and not before for before, now in zip([False, *made.mask], made.mask, strict=False))


def test_where_the_template_forgets_a_new_row_begins() -> None:
    renderer = with_template(FORGETS_THINKING)
    first, second = said("assistant", "hm</think>1"), said("assistant", "so</think>2")
    rows = rows_of(renderer, read({"messages": [said("user", "a"), first, said("user", "b"), second]}), None)
    assert [renderer.decode([i for i, shown in zip(r.ids, r.mask, strict=True) if shown]) for r in rows] == [
        "hm</think>1<|im_end|>",
        "so</think>2<|im_end|>",
    ]
    assert "hm</think>" not in renderer.decode(rows[1].ids)


def test_consecutive_answers_each_have_loss() -> None:
    messages = [said("user", "a"), said("assistant", "1"), said("assistant", "2")]
    (row,) = rows_of(RENDERER, read({"messages": messages}), None)
    assert RENDERER.decode([i for i, shown in zip(row.ids, row.mask, strict=True) if shown]) == f"1{END}2{END}"


FORBIDS = "{%- if m.role == 'critic' %}{{ raise_exception('no critics') }}{%- endif %}"
REFUSES = "{%- for m in messages %}" + FORBIDS + "{%- endfor %}"
NO_STOP = "{%- for m in messages %}{{ m.content }}{%- endfor %}{%- if add_generation_prompt %}:{%- endif %}"
PROMPT = "'<|im_start|>assistant\\n"
THINKS = FORGETS_THINKING.replace(f"{PROMPT}' }}}}{{%- endif", f"{PROMPT}<think>' }}}}{{%- endif")
assert THINKS != FORGETS_THINKING


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            REFUSES,
            [said("critic", "a"), said("assistant", "1")],
            "refuses it .*no critics.*roles are critic, assistant",
        ),
        (NO_STOP, [said("user", "a"), said("assistant", "1")], r"message 1 \(assistant\).*does not end it with a stop"),
        (THINKS, [said("user", "a"), said("assistant", "1")], "behind the prompt of its turn.*or actors.renderer"),
    ],
)
def test_what_a_template_cannot_show_is_said(template: str, messages: list[Any], problem: str) -> None:
    with pytest.raises(CannotRender, match=problem):
        rows_of(with_template(template), read({"messages": messages}), None)


def test_a_row_longer_than_the_models_context_is_refused() -> None:
    (row,) = rows_of(RENDERER, read(turns(2)), None)
    assert rows_of(RENDERER, read(turns(2)), len(row.ids)) == [row]
    with pytest.raises(CannotRender, match=f"{len(row.ids)} tokens in one row, the model has {len(row.ids) - 1} posit"):
        rows_of(RENDERER, read(turns(2)), len(row.ids) - 1)


class FakeFamily:
    """As the package `renderers` has one for each model family."""

    def get_stop_token_ids(self) -> list[int]:
        return list(RENDERER.stop_token_ids)

    def render_ids(self, messages: Any, *, tools: Any, add_generation_prompt: bool) -> list[int]:
        wrapped = [{"type": "function", "function": tool} for tool in tools or ()]
        text = TOKENIZER.apply_chat_template(
            messages, tools=wrapped or None, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        return list(TOKENIZER.encode(text, add_special_tokens=False))

    def bridge_to_next_turn(self, before: list[int], sampled: list[int], new: Any, *, tools: Any) -> Any:
        text = "".join(f"\n<|im_start|>{m['role']}\n{m['content']}{END}" for m in new) + f"\n{BEGIN}"
        ids = [*before, *sampled, *TOKENIZER.encode(text, add_special_tokens=False)]
        return type("Bridged", (), {"token_ids": ids})()


def test_a_renderer_of_a_model_family_shows_the_same() -> None:
    bridged = BridgedRenderer(FakeFamily(), len(build_tokenizer()), RENDERER.decode)
    row = {
        "messages": [said("user", "?"), called(key="fox"), said("tool", "41"), said("assistant", "3")],
        "tools": TOOLS,
    }
    assert rows_of(bridged, read(row), None) == rows_of(RENDERER, read(row), None)
    with pytest.raises(CannotRender, match="FakeFamily without render_answer"):
        rows_of(FakeFamily(), read(row), None)  # type: ignore[arg-type]
