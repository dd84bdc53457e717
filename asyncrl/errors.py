"""The two kinds of errors that end a run, with different exit codes of the command line."""

from __future__ import annotations


class AsyncRLError(Exception):
    """Shown to the user as one sentence, without a traceback unless `--debug`."""

    exit_code = 1


class ConfigError(AsyncRLError):
    """The configuration cannot work. Names the field, its value, what was expected, the remedy. Exit code 2."""

    exit_code = 2


class RunError(AsyncRLError):
    """The run could not start or continue. Says what happened, to which process, and what to do. Exit code 1."""
