"""A row of a table as a task: columns mapped to the names that a task has, values that a ticket can carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(eq=False, kw_only=True)
class Columns:
    """How a row becomes a task: options of a source."""

    columns: dict[str, str] | None = None
    """Task name -> column; a dot reaches into nested values on both sides (`extra_info.level: level`)."""
    drop_columns: list[str] | None = None
    """Columns left out, e.g. images, which a ticket cannot carry."""
    where: dict[str, Any] | None = None
    """Only rows with these values, by column: `{ability: code}`."""
    prompt_template: str | None = None
    """The prompt as text, with columns in braces: `"{question} Think step by step."`."""
    system_prompt: str | None = None
    """Put before the prompt."""
    constants: dict[str, Any] | None = None
    """Further values of every task, by the name that they have in a task."""

    def _task_of(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The task of one row.

        Args:
            row: by column. verl's (`data_source`, `prompt`, `ability`, `reward_model`, `extra_info`) need no mapping.
            where: names the row in errors and is the task's `id`, unless the row has one.
        Raises ConfigError naming the row if it has no usable prompt.
        """
        task: dict[str, Any] = {name: _plain(value) for name, value in row.items()}
        mapped = {name: _plain(_reach(row, column, where)) for name, column in (self.columns or {}).items()}
        for name, value in {**mapped, **(self.constants or {})}.items():
            _put(task, name, value)
        if self.prompt_template is not None:
            try:
                task["prompt"] = self.prompt_template.format_map(row)
            except (KeyError, IndexError, ValueError) as error:
                raise ConfigError(
                    f"data.options.prompt_template asks for {error} and the columns of {where} are {', '.join(row)}: "
                    "name one of these in braces, and write other braces twice."
                ) from error
        task["prompt"] = _with_system(_prompt(task, where), self.system_prompt)
        task["id"] = str(task["id"]) if task.get("id") is not None else where
        return task


def _prompt(task: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    prompt = task.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{where} has {prompt!r} as its prompt: expected text or a list of chat messages. Its columns are "
            f"{', '.join(task)}; map one with data.options.columns: {{prompt: COLUMN}}, or fix the row."
        )
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ConfigError(f"{where}: its prompt holds {message!r}, expected a message with `role` and `content`.")
    # Arrow gives every message the keys of all messages; those that a message did not have are None.
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _with_system(prompt: str | list[dict[str, Any]], system: str | None) -> str | list[dict[str, Any]]:
    if system is None:
        return prompt
    rest = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": "system", "content": system}, *rest]


def _reach(row: Mapping[str, Any], column: str, where: str) -> Any:
    value: Any = row
    for part in (column,) if column in row else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"data.options.columns names {column!r}, which {where} does not have: its columns are {', '.join(row)}."
            )
        value = value[part]
    return value


def _put(task: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        inner = task.get(parent)
        task[parent] = dict(inner) if isinstance(inner, Mapping) else {}
        task = task[parent]
    task[last] = value


def _plain(value: Any) -> Any:
    """The value in types that msgpack carries; dates and times become ISO text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, timedelta) else value
