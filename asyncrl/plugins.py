"""A choice made by name: an entry of a table, or an import path to the user's own code.

>>> resolve("mean", {"mean": min, "median": max}, "sampler.kind") is min
True
>>> resolve("math:sqrt", None, "sampler.kind")(9.0)
3.0
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from asyncrl.errors import ConfigError, expected

T = TypeVar("T")


@overload
def resolve(name: str, table: Mapping[str, str] | None, field: str) -> Any: ...
@overload
def resolve(name: str, table: Mapping[str, T], field: str) -> T: ...
def resolve(name: str, table: Mapping[str, Any] | None, field: str) -> Any:
    """The object that `name` means: an entry of `table`, `package.module:Name`, or `path/to/file.py:Name`.

    An entry that is a text is an import path itself, so that a table imports nothing. `field` is the config field that
    holds `name`; errors begin with it. Raises ValueError for a name that is neither, a module that is not found, and a
    missing attribute. An error raised inside the user's module while it is imported passes through.
    """
    if table is not None and name in table:
        entry = table[name]
        return resolve(entry, None, field) if isinstance(entry, str) else entry
    if ":" not in name:
        known = sorted(table or ())
        expected = f"one of {', '.join(known)}, or " if known else ""
        raise ValueError(
            f"{field}: {name!r} is not a known name{_nearest(name, known)}. Expected {expected}an import path "
            f"'package.module:Name' or 'path/to/file.py:Name'."
        )
    where, _, attribute = name.rpartition(":")
    load = _load_file if where.endswith(".py") else _load_module
    value: Any = load(where, name, field)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ValueError(
                f"{field}: {name!r}: {where!r} has no {attribute!r}{_nearest(part, _public(value))}. "
                f"Name an attribute that it defines."
            )
        value = getattr(value, part)
    return value


def _public(value: Any) -> list[str]:
    return [name for name in getattr(value, "__dict__", ()) if not name.startswith("_")]


def choose(
    name: str,
    table: Mapping[str, Any] | None,
    field: str,
    options: Mapping[str, Any],
    *,
    options_field: str | None = None,
    provided: Iterable[str] = (),
) -> Any:
    """The function or class that `name`, the value of `field`, means, checked to take `options`. Raises ConfigError.

    `options_field` names the options in errors (default: `field` with `_options`); `provided`: see `check_options`.
    """
    try:
        made = resolve(name, table, field)
        if not callable(made):
            raise ValueError(f"{field} is {name!r}, a {type(made).__name__}: expected a function or a class.")
        check_options(made, options, options_field or f"{field}_options", provided)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return made


def build(
    name: str,
    table: Mapping[str, Any] | None,
    field: str,
    options: Mapping[str, Any],
    *,
    options_field: str | None = None,
    provided: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Any:
    """What `choose` returns, called with `options`, with `provided`, and with those of `defaults` that it has
    parameters for and that are not among the options. Raises ConfigError, also for a ValueError of the call."""
    passed = {n: value for n, value in (defaults or {}).items() if n not in options} | dict(provided or {})
    made = choose(name, table, field, options, options_field=options_field, provided=passed)
    taken = inspect.signature(made).parameters
    passed = {n: value for n, value in passed.items() if n in taken or n in (provided or {})}
    try:
        return made(**passed, **options)
    except ValueError as error:
        raise ConfigError(f"{field} is {name!r}: {error}") from error


def check_options(fn: Callable[..., Any], options: Mapping[str, Any], field: str, provided: Iterable[str] = ()) -> None:
    """Refuse `options` that `fn` cannot be called with, before anything runs.

    `provided` are the parameters that the caller passes itself (positionally or by keyword): options must not set them.
    Checks unknown names, missing required ones, and each value against its annotation (strictly: the string "1e-6" is
    not a float). Raises ValueError.
    """
    of = getattr(fn, "__name__", repr(fn))
    _check_option_names(fn, of, options, field, set(provided))
    hints = _annotations(fn)
    for name, value in options.items():
        if name in hints:
            _check_value(value, hints[name], f"{field}.{name}", of)


def _check_option_names(
    fn: Callable[..., Any], of: str, options: Mapping[str, Any], field: str, provided: set[str]
) -> None:
    parameters = inspect.signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    free = [n for n in named if n not in provided]
    if twice := [name for name in options if name in provided]:
        raise ValueError(f"{field}.{twice[0]}: is passed to {of} by asyncrl itself. Remove it from the options.")
    if not takes_any and (unknown := [name for name in options if name not in named]):
        hint, listed = _nearest(unknown[0], free), ", ".join(free) or "none"
        raise ValueError(f"{field}.{unknown[0]}: {of} has no such option{hint}. It takes: {listed}.")
    needed = [name for name in free if named[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in options]:
        raise ValueError(f"{field}.{missing[0]}: {of} needs it and it is not set. Add it to the options.")


def _check_value(value: Any, hint: Any, field: str, of: str) -> None:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError as error:
        if not isinstance(error, PydanticSchemaGenerationError) and error.code != "type-adapter-config-unused":
            return  # pydantic has no schema for this annotation: the value goes unchecked
        try:
            adapter = TypeAdapter(hint)
        except PydanticUserError:
            return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        wanted = expected(e["msg"] for e in error.errors())
        numeral = " Write the number without quotes and with a dot, as in 1.0e-6." if _is_numeral(value) else ""
        raise ValueError(f"{field}: {value!r} does not suit {of}: {wanted}.{numeral}") from None


def _is_numeral(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def _annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    # The fields of a dataclass may be annotated in several modules, which only its own hints resolve.
    target = fn.__init__ if inspect.isclass(fn) and not dataclasses.is_dataclass(fn) else fn
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}  # names imported for type checkers only: the values go unchecked, the names were checked above


def _load_module(where: str, name: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the module exists; something that it imports does not
        single = " with a single colon" if "::" in name else ""
        raise ValueError(
            f"{field}: {name!r}: no module named {error.name!r}. Install it, set PYTHONPATH, or write "
            f"'path/to/file.py:Name'{single}."
        ) from None


def _load_file(where: str, name: str, field: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ValueError(
            f"{field}: {name!r}: no file {path}. Give a path relative to {Path.cwd()}, or an absolute one."
        )
    # One module per file, however often it is named, so that its classes compare equal. dataclasses and pickle look for
    # it in sys.modules.
    module_name = f"asyncrl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{field}: {name!r}: {path} cannot be loaded as Python. Name a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
