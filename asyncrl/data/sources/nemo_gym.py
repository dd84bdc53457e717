"""Tasks of NeMo Gym: JSON lines with `responses_create_params` (the prompt) and what its verifier needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.data.base import Message
from asyncrl.data.order import ListedTasks, training_size
from asyncrl.errors import ConfigError


class NemoGymSource(ListedTasks):
    """The rows of a file, the last ones held out, in a new order in each epoch. For `env.name: nemo_gym`."""

    def __init__(self, path: str, *, held_out_size: int = 0, seed: int = 0) -> None:
        """
        Args:
            path: the file; each task has its parsed line as `row`.
            held_out_size: how many of the last rows are kept out of training.
        Raises ConfigError for a missing file, or a line that is not such a row.
        """
        if not Path(path).is_file():
            raise ConfigError(f"data.options.path is {path!r}, which is not a file: expected JSON lines of NeMo Gym.")
        tasks = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                    prompt = messages_of(row["responses_create_params"]["input"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{path} line {number}: {type(error).__name__}: {error}; expected an object whose "
                        "responses_create_params.input is text or a list of Responses items of text."
                    ) from error
                tasks.append({"id": f"{Path(path).name}:{number}", "prompt": prompt, "row": row})
        split = training_size(len(tasks), held_out_size, f"rows of {path}")
        super().__init__("nemo_gym", tasks[:split], tasks[split:], seed)


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """The input of OpenAI's Responses as chat messages. Raises ValueError for what is not text.

    >>> messages_of([{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": json.loads(item["arguments"])}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind != "reasoning":  # the reasoning of earlier turns is not shown again
            raise ValueError(f"an input item is a {kind}")
    if not messages:
        raise ValueError("the input is empty")
    return messages


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if wrong := [part["type"] for part in content if part["type"] not in ("input_text", "output_text", "text")]:
        raise ValueError(f"a content part is of type {wrong[0]!r}; expected input_text, output_text or text")
    return "\n".join(part["text"] for part in content)
