"""Prints the findings, those to fix last."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config import Config
from asyncrl.doctor import machine, model, packages


def run(config: Config, say: Callable[[str], None] = print) -> int:
    """The exit code: 1 if anything is to fix."""
    found = [*packages.look(config), *machine.look(config, model.weights(config)), *model.look(config)]
    for level in ("ok", "note", "fix"):
        for finding in found:
            if finding.level == level:
                say(str(finding))
    count = sum(finding.level == "fix" for finding in found)
    say(f"{count} to fix" if count else "nothing to fix")
    return 1 if count else 0
