"""A choice made by name: an entry of a table, or an import path to the user's own code.

>>> resolve("mean", {"mean": min, "median": max}, "sampler.kind") is min
True
>>> resolve("math:sqrt", None, "sampler.kind")(9.0)
3.0
"""

from __future__ import annotations

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

from asyncrl.errors import ConfigError

T = TypeVar("T")


@overload
def resolve(name: str, table: Mapping[str, str] | None, field: str) -> Any: ...
@overload
def resolve(name: str, table: Mapping[str, T], field: str) -> T: ...
def resolve(name: str, table: Mapping[str, Any] | None, field: str) -> Any:
    """The object that `name` means: an entry of `table`, `package.module:Name`, or `path/to/file.py:Name`.

    An entry that is a text is an import path itself, so that a table imports nothing. `field` is the config field that
    holds `name`; errors begin with it.
    Raises ValueError for a name that is neither, for a module that is not found, and for a missing attribute.
    An error raised inside the user's module while it is imported passes through as it is.
    """
    if table is not None and name in table:
        entry = table[name]
        return resolve(entry, None, field) if isinstance(entry, str) else entry
    if ":" not in name:
        known = sorted(table or ())
        listed = f"one of {', '.join(known)}, or " if known else ""
        raise ValueError(
            f"{field}: {name!r} is not a known name{_nearest(name, known)}. Expected {listed}an import path "
            f"'package.module:Name' or 'path/to/file.py:Name'."
        )
    where, _, attribute = name.rpartition(":")
    found: Any = _load_file(where, name, field) if where.endswith(".py") else _load_module(where, name, field)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [a for a in vars(found) if not a.startswith("_")] if hasattr(found, "__dict__") else []
            raise ValueError(
                f"{field}: {name!r}: {where!r} has no {attribute!r}{_nearest(part, public)}. "
                f"Name an attribute that it defines."
            )
        found = getattr(found, part)
    return found


def check_options(fn: Callable[..., Any], options: Mapping[str, Any], field: str, provided: Iterable[str] = ()) -> None:
    """Refuse `options` that `fn` cannot be called with, before anything runs.

    `provided` are the parameters that the caller passes itself (positionally or by keyword): they must not be given
    again, and need not be. Checks unknown names, missing required ones, and each value against its annotation
    (strictly: the string "1e-6" is not a float). Raises ValueError.
    """
    provided = set(provided)
    parameters = inspect.signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_names = [n for n in named if n not in provided]
    of = getattr(fn, "__name__", repr(fn))

    for name in options:
        if name in provided:
            raise ValueError(f"{field}.{name}: is passed to {of} by asyncrl itself. Remove it from the options.")
        if name not in named and not takes_any:
            listed = ", ".join(open_names) if open_names else "none"
            hint = _nearest(name, open_names)
            raise ValueError(f"{field}.{name}: {of} has no such option{hint}. It takes: {listed}.")
    for name in open_names:
        if named[name].default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"{field}.{name}: {of} needs it and it is not set. Add it to the options.")

    hints = _annotations(fn)
    for name, value in options.items():
        if name in hints:
            _check_value(value, hints[name], f"{field}.{name}", of)


def _check_value(value: Any, hint: Any, field: str, of: str) -> None:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError as error:
        if not isinstance(error, PydanticSchemaGenerationError) and error.code != "type-adapter-config-unused":
            return  # an annotation that pydantic has no schema for states nothing that could be checked
        try:
            adapter = TypeAdapter(hint)
        except PydanticUserError:
            return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        expected = "; ".join(dict.fromkeys(e["msg"] for e in error.errors()))
        numeral = " Write the number without quotes and with a dot, as in 1.0e-6." if _is_numeral(value) else ""
        raise ValueError(f"{field}: {value!r} does not suit {of}: {expected}.{numeral}") from None


def _is_numeral(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def _annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    target = fn.__init__ if inspect.isclass(fn) else fn
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}  # names imported for type checkers only: the values go unchecked, the names were checked above


def _load_module(where: str, name: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the module is there; something that it imports is not
        raise ValueError(
            f"{field}: {name!r}: no module named {error.name!r}. Install it, set PYTHONPATH, or write "
            f"'path/to/file.py:Name'."
        ) from None


def _load_file(where: str, name: str, field: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ValueError(
            f"{field}: {name!r}: no file {path}. Give a path relative to {Path.cwd()}, or an absolute one."
        )
    # One module per file, however often it is named: classes of it must compare equal. Registered by a name of its
    # own so that dataclasses and pickle find it.
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


def opened(
    name: str,
    table: Mapping[str, Any],
    field: str,
    options: Mapping[str, Any],
    options_field: str,
    given: Mapping[str, Any],
) -> Any:
    """What `name`, the value of `field`, means, called with `options` and with those of `given` that it has parameters
    for and that are no options. Raises ConfigError."""
    try:
        make: Callable[..., Any] = resolve(name, table, field)
        parameters = inspect.signature(make).parameters
        provided = {n: value for n, value in given.items() if n in parameters and n not in options}
        check_options(make, options, options_field, provided)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return make(**provided, **options)
