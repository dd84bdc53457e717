"""The `asyncrl` command. Its code is imported when it is called, so that Ctrl-C during the imports is told as later."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.cli import hidden


def main(arguments: Sequence[str] | None = None) -> None:
    """Finds the command and runs it (dispatch.py); exits with its code."""
    hidden.tell()
    try:
        from asyncrl.cli.dispatch import main as dispatched
    except KeyboardInterrupt:
        print("asyncrl: stopped by the user.", file=sys.stderr)
        sys.exit(130)
    dispatched(arguments)


__all__ = ["main"]
