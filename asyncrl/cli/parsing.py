"""Parses the command line of commands that take a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import tyro

from asyncrl.errors import ConfigError


def parse(options: type[Any], words: list[str], command: str, description: str | None) -> tuple[Any, dict[str, Any]]:
    """The command's own options, and the config fields given as flags. Raises ConfigError."""
    from asyncrl.config.flags import flags_type, given_flags, unknown_flag

    both = dataclasses.make_dataclass(command, [], bases=(flags_type(), options), frozen=True)
    parsed: Any
    parsed, unknown = tyro.cli(
        both, args=words, prog=f"asyncrl {command}", description=(description or "").strip(), return_unknown_args=True
    )
    for word in unknown:
        if word.startswith("-"):
            raise unknown_flag(word, command)
    if unknown:
        raise ConfigError(f"{unknown[0]!r} belongs to no flag: `asyncrl {command} --help` lists them all.")
    return parsed, given_flags(parsed)
