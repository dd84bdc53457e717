"""Chats for tests, and files of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "", "parameters": {}}}]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def called(**arguments: Any) -> dict[str, Any]:
    call = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def turns(number: int) -> dict[str, Any]:
    """A chat of one turn, or of two with a tool between them."""
    ask = said("user", f"What is {number}?")
    if number % 2:
        return {"messages": [ask, said("assistant", str(number))]}
    return {"messages": [ask, called(key="fox"), said("tool", "41"), said("assistant", str(number))], "tools": TOOLS}


def written(path: Path, chats: Sequence[Any]) -> str:
    path.write_text("".join(f"{chat if isinstance(chat, str) else json.dumps(chat)}\n" for chat in chats))
    return str(path)
