"""A function chosen in the config: by name from a table or by import path, with options, called with what it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A function with its options, called with what it has parameters for."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    parameters: frozenset[str]

    def __call__(self, known: Mapping[str, Any]) -> Any:
        inputs = {k: v for k, v in known.items() if k in self.parameters and k not in self.options}
        return self.function(**inputs, **self.options)


def checked(value: Any, kind: type[T], of: Chosen) -> T:
    """What the user's own function gave. Raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{of.name!r} returned a {type(value).__name__}: expected {kind.__module__}.{kind.__name__} "
            "(docs/algorithms.md)."
        )
    return value


def chosen(
    name: str,
    table: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any],
    field: str,
    provided: Collection[str],
    options_field: str | None = None,
) -> Chosen:
    """`provided`: inputs that asyncrl passes, which are no options. Raises ConfigError, naming the field."""
    try:
        function = resolve(name, table, field)
        check_options(function, options, options_field or f"{field}_options", provided)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Chosen(name, function, dict(options), frozenset(inspect.signature(function).parameters))


def chosen_entry(
    entry: Mapping[str, Any], table: Mapping[str, Callable[..., Any]], field: str, provided: Collection[str]
) -> Chosen:
    """An entry holds a name and, beside it, the options. Raises ConfigError, naming the field."""
    if "name" not in entry:
        raise ConfigError(f"{field} is {dict(entry)!r}: it needs a name, one of {', '.join(table)}.")
    options = {k: v for k, v in entry.items() if k != "name"}
    return chosen(str(entry["name"]), table, options, field, provided, field)


def chosen_list(
    entries: Collection[Mapping[str, Any]],
    table: Mapping[str, Callable[..., Any]],
    field: str,
    provided: Collection[str],
) -> list[Chosen]:
    """Of several entries; errors name the field and the place."""
    return [chosen_entry(entry, table, f"{field}[{i}]", provided) for i, entry in enumerate(entries)]
