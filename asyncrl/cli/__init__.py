"""The `asyncrl` command."""

from asyncrl.cli.dispatch import main

__all__ = ["main"]
