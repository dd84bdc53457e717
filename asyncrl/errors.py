"""The two ways a run ends badly, told apart by the exit code that the command line gives them."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Shown to the user as one sentence, without a traceback unless `--debug`."""

    exit_code = 1


class ConfigError(AsyncRLError):
    """The configuration cannot work: names the field, its value, what was expected, the remedy. Exit code 2."""

    exit_code = 2


class RunError(AsyncRLError):
    """The run could not start or go on: says what happened, to whom, and what to do. Exit code 1."""
