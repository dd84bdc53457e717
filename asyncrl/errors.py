"""The two kinds of errors that end a run, with different exit codes of the command line."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable


class AsyncRLError(Exception):
    """Shown to the user as one sentence, without a traceback unless `--debug`."""

    exit_code = 1


class ConfigError(AsyncRLError):
    """The configuration cannot work. Names the field, its value, what was expected, the remedy. Exit code 2."""

    exit_code = 2


class RunError(AsyncRLError):
    """The run could not start or continue. Says what happened, to which process, and what to do. Exit code 1."""


def described(error: AsyncRLError | OSError | KeyboardInterrupt) -> tuple[int, str]:
    """The exit code and the sentence for the user."""
    if isinstance(error, AsyncRLError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "stopped by the user."
    remedy = " Free some space, or choose another launch.runs_dir." if error.errno == errno.ENOSPC else ""
    return 1, f"{error.filename or 'system'}: {error.strerror or error}.{remedy}"


_PLAIN_WORDS = (
    ("Value error, ", ""),
    (" or instance of [A-Za-z]+", ""),
    ("'str' instances are not allowed as a Sequence value", "a list, as in [a, b]"),
    ("Input should be ", ""),
    ("a valid (tuple|list)", "a list, as in [a, b]"),
    ("a valid dictionary", "a mapping, as in {name: value}"),
    ("^callable$", "a function"),
)


def expected(messages: Iterable[str]) -> str:
    """What was expected, from pydantic's messages about one value: one for each kind that it could have been.

    >>> expected(["Input should be a valid tuple"])
    'expected a list, as in [a, b]'
    >>> expected(["Input should be greater than or equal to 0", "Input should be 'auto'"])
    "expected greater than or equal to 0, or 'auto'"
    >>> expected(["Value error, two of them are equal"])
    'two of them are equal'
    """
    kinds: dict[str, None] = {}
    own = False
    for message in messages:
        own = own or message.startswith("Value error, ")
        for wanted, words in _PLAIN_WORDS:
            message = re.sub(wanted, words, message)
        kinds[message] = None
    return ("" if own else "expected ") + ", or ".join(kinds)
