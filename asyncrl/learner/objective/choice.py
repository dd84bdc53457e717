"""A function chosen in the config: by name from a table or by import path, with its options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A function with its options."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, *inputs: Any, **more: Any) -> Any:
        return self.function(*inputs, **more, **self.options)


@dataclass(frozen=True, slots=True)
class Kind:
    """A table of functions that take one typed structure, `inputs`, and options."""

    table: Mapping[str, Callable[..., Any]]
    inputs: type[Any]
    """The structure: a dataclass"""

    def choose(self, name: str, options: Mapping[str, Any], field: str, options_field: str | None = None) -> Chosen:
        """Raises ConfigError, naming the field."""
        function = _resolved(name, self.table, field)
        signature = inspect.signature(function)
        if next(iter(signature.parameters), "") != "inputs":
            raise ConfigError(
                f"{field}: {name!r} has the signature {signature}. Its first parameter must be "
                f"`inputs: {self.inputs.__name__}` ({self.inputs.__module__}), whose fields are the tensors; all other "
                "parameters are options (docs/reference/algorithms.md, 'Your own')."
            )
        passed = ("inputs", *(f.name for f in dataclasses.fields(self.inputs)))
        return _with_options(name, function, options, options_field or f"{field}_options", passed)

    def choose_entry(self, entry: Mapping[str, Any], field: str) -> Chosen:
        """Chooses by an entry `{name: ..., option: value}`. Raises ConfigError, naming the field."""
        if "name" not in entry:
            raise ConfigError(f"{field} is {dict(entry)!r}: it needs a name, one of {', '.join(self.table)}.")
        options = {k: v for k, v in entry.items() if k != "name"}
        return self.choose(str(entry["name"]), options, field, field)

    def choose_all(self, entries: Collection[Mapping[str, Any]], field: str) -> list[Chosen]:
        """Chooses by several entries; errors name the field and the index."""
        return [self.choose_entry(entry, f"{field}[{i}]") for i, entry in enumerate(entries)]


def chosen(
    name: str,
    table: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any],
    field: str,
    provided: Collection[str],
) -> Chosen:
    """`provided`: parameters that asyncrl passes, which are not options. Raises ConfigError, naming the field."""
    return _with_options(name, _resolved(name, table, field), options, f"{field}_options", provided)


def checked(value: Any, kind: type[T], of: Chosen) -> T:
    """The result of a function of the user's. Raises TypeError if it is not of the type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{of.name!r} returned a {type(value).__name__}: expected {kind.__module__}.{kind.__name__} "
            "(docs/reference/algorithms.md)."
        )
    return value


def _resolved(name: str, table: Mapping[str, Callable[..., Any]], field: str) -> Callable[..., Any]:
    try:
        return resolve(name, table, field)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _with_options(
    name: str, function: Callable[..., Any], options: Mapping[str, Any], field: str, provided: Collection[str]
) -> Chosen:
    try:
        check_options(function, options, field, provided)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Chosen(name, function, dict(options))
