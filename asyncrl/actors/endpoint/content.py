"""The text of a message's content, in any of the protocols; everything else is refused, naming its field."""

from __future__ import annotations

from typing import Any


class UnreadableContent(ValueError):
    """Content that the policy, a language model, cannot read."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def text_of(content: Any, field: str = "content", first: int = 0) -> str:
    """The text of `content`, a str or a list of parts with text. `field` and `first` (index of the first part) are for
    errors. Raises UnreadableContent.

    >>> text_of([{"type": "input_text", "text": "Hi"}])
    'Hi'
    >>> text_of([{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:"}}])
    Traceback (most recent call last):
    asyncrl.actors.endpoint.content.UnreadableContent: content[1].image_url: the policy reads text only. Leave it out.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(_part(part, f"{field}[{index}]") for index, part in enumerate(parts, first))


def _part(part: Any, field: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise UnreadableContent(f"{field}.{kind}", "the policy reads text only. Leave it out.")
    raise UnreadableContent(field, f"it is a {type(part).__name__}; expected text, or a list of parts of type text")
