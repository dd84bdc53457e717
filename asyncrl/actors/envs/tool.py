"""Tools: a name, a JSON schema and a callable. Any Python function with type hints and a docstring can be a tool."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model


class ToolError(Exception):
    """Raised by a tool to tell the policy that its call was wrong. The episode continues.

    Any other exception is a failure of the tool, not of the policy, and ends the episode as `env_error`.
    """


@dataclass(frozen=True, slots=True)
class Tool:
    """A callable for the policy."""

    name: str
    schema: dict[str, Any]
    """OpenAI form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    call: Callable[..., Any]
    """A function, run in a thread, or a coroutine function; takes the arguments by keyword."""
    arguments: type[BaseModel] | None = None
    """Checks and converts the arguments before the call; None: they are passed unchanged."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """A tool with a schema from the signature and the docstring (Google style `Args:` describe the parameters).

        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first number
        ...     '''
        ...     return a + b
        >>> Tool.from_function(add).schema["function"]["parameters"]["required"]
        ['a']
        """
        # Every access to a bound method creates an object; its function is the same, and so shares one schema.
        schema, arguments = _describe(getattr(function, "__func__", function))
        return cls(schema["function"]["name"], schema, function, arguments)

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """The result of a call as text. Raises ToolError when the arguments do not fit the schema."""
        if self.arguments is not None:
            try:
                checked = self.arguments.model_validate(arguments)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "arguments"
                raise ToolError(f"argument {where}: {first['msg']}") from error
            arguments = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self.call):
            result = await self.call(**arguments)
        else:
            result = await asyncio.to_thread(self.call, **arguments)
            if inspect.isawaitable(result):
                result = await result
        return result if isinstance(result, str) else _as_text(result)


def _as_text(result: Any) -> str:
    import json

    return json.dumps(result, ensure_ascii=False, default=str)


@lru_cache(maxsize=1024)
def _describe(function: Callable[..., Any]) -> tuple[dict[str, Any], type[BaseModel]]:
    name = getattr(function, "__name__", type(function).__name__)
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {}
    summary, described = _docstring(inspect.getdoc(function) or "")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"tool {name}: parameter {parameter} cannot be passed by name; make it a plain named parameter"
            )
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name} has no type hint; add one, e.g. `str`")
        default = ... if parameter.default is parameter.empty else parameter.default
        description = described.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=description))
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    parameters = arguments.model_json_schema()
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    for part in parameters.get("properties", {}).values():
        part.pop("title", None)
    parameters.setdefault("properties", {})
    function_schema = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": function_schema}, arguments


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's text before its sections, and the descriptions under `Args:`."""
    head, _, rest = text.partition("Args:")
    section = re.split(r"\n\s*\n|\n(?:Returns|Raises|Yields|Examples?):", rest)[0]
    described = re.findall(r"^\s+(\w+)(?: \([^)]*\))?:\s*(.+(?:\n\s{8,}.+)*)", section, re.MULTILINE)
    summary = re.split(r"\n(?:Returns|Raises|Yields|Examples?):", head)[0]
    return " ".join(summary.split()), {name: " ".join(words.split()) for name, words in described}
