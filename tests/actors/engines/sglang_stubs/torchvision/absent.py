from __future__ import annotations

from typing import Any


class Absent:
    """Of whatever name: may be imported and named in a type hint, not made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("torchvision is a fake here: no images")


def absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent
