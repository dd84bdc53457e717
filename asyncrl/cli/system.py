"""Whether this system has the calls without which no command works."""

from __future__ import annotations

import importlib
import sys

from asyncrl.errors import ConfigError

CALLS = ("fcntl", "resource")
"""Modules of Python for locks of files and limits of processes; Windows has neither."""


def check() -> None:
    """Raises ConfigError, with the remedy, before an import fails somewhere."""
    for module in CALLS:
        try:
            importlib.import_module(module)
        except ImportError:
            raise ConfigError(
                f"asyncrl runs on Linux, and this is {sys.platform}, without {module}: use a Linux machine, a container"
                " or WSL 2."
            ) from None
