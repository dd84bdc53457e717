"""Keeps secrets out of what a run writes: logs, events, the summary, the report, trackers.

A secret is the value of a field or an environment variable that is named as one (`api_key`, `*_token`, `password`),
of an HTTP header, of a password in a URL. An option may name an environment variable instead, `${NAME}`: then only the
process that uses it has the value, and no file has it.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

MASK = "[secret]"
SHORTEST = 8
"""A shorter value is not looked for in texts: it would also be found in ordinary words."""
REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*)\}")
_NAME = re.compile(
    r"(?:^|_)(?:api_?keys?|secrets?|passwords?|passwd|passphrase|authorization|credentials?|cookies?|bearer|"
    r"private_key|access_key|secret_key|tokens?)$"
)
_IN_URL = re.compile(r"//[^/\s:@]*:(?P<password>[^/\s@]+)@|[?&](?:api_?key|token|key|secret)=(?P<argument>[^&\s]+)")
_hidden: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether a field, header or variable of this name holds a secret.

    >>> is_secret("X-Api-Key"), is_secret("HF_TOKEN"), is_secret("api_key_env"), is_secret("stop_token_ids")
    (True, True, False, False)
    """
    return _NAME.search(re.sub(r"[^a-z0-9]+", "_", name.lower())) is not None


def masked(values: Any, secret: bool = False) -> Any:
    """`values` with MASK in place of each secret; references stay."""
    if isinstance(values, Mapping):
        return {name: masked(value, secret or _under(str(name))) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(masked(value, secret) for value in values)
    if not isinstance(values, str):
        return values
    if secret and values and not REFERENCE.search(values):
        return MASK
    for found in _in_url(values):
        values = values.replace(found, MASK)
    return values


def given_in_clear(values: Any, path: str = "", secret: bool = False) -> Iterator[tuple[str, str]]:
    """The path and the value of each secret that stands in `values` itself."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from given_in_clear(value, f"{path}.{name}".lstrip("."), secret or _under(str(name)))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from given_in_clear(value, path, secret)
    elif isinstance(values, str) and secret and values and not REFERENCE.search(values):
        yield path, values
    elif isinstance(values, str):
        yield from ((path, found) for found in _in_url(values))


def resolved(options: Any) -> Any:
    """`options` with the values of the environment variables that they name. Raises ValueError for one that is not set.

    The values are hidden from now on.
    """
    if isinstance(options, Mapping):
        return {name: resolved(value) for name, value in options.items()}
    if isinstance(options, list | tuple):
        return type(options)(resolved(value) for value in options)
    return REFERENCE.sub(_value, options) if isinstance(options, str) else options


def hide(values: Any = None) -> None:
    """From now on `redact` replaces the secrets in `values` (of a configuration), those that it names, and those of
    this process's environment."""
    _remember(value for name, value in os.environ.items() if is_secret(name))
    _remember(secret for _, secret in given_in_clear(values or {}))
    _remember(os.environ.get(name, "") for name in _references(values))


def redact(text: str) -> str:
    """`text` without the hidden secrets."""
    for secret in sorted(_hidden, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def redacted(value: Any) -> Any:
    """Every text in `value` redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redacted(each) for name, each in value.items()}
    return type(value)(redacted(each) for each in value) if isinstance(value, list | tuple) else value


def redact_tracebacks() -> None:
    """The traceback of an exception that ends this process, or a thread of it, goes to stderr without secrets."""

    def show(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        print(redact("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)

    sys.excepthook = show
    threading.excepthook = lambda failed: show(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _remember(values: Iterable[str]) -> None:
    _hidden.update(value for value in values if len(value) >= SHORTEST)


def _value(reference: re.Match[str]) -> str:
    name = reference["name"]
    if name not in os.environ:
        raise ValueError(f"an option names ${{{name}}}, and this process's environment has no {name}: set it.")
    _remember([os.environ[name]])
    return os.environ[name]


def _references(values: Any) -> Iterator[str]:
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _references(value)
    elif isinstance(values, str):
        yield from (found["name"] for found in REFERENCE.finditer(values))


def _under(name: str) -> bool:
    """Whether everything below a field of this name is secret."""
    return is_secret(name) or name.lower() == "headers"


def _in_url(text: str) -> Iterator[str]:
    for found in _IN_URL.finditer(text) if "//" in text else ():
        value = found["password"] or found["argument"]
        if not REFERENCE.search(value):
            yield value
