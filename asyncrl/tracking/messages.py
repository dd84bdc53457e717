"""What a role's report must hold before anything of it is used. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.wire import Frame, WireError, unpack

KINDS = ("ready", "metrics", "waiting", "event")
MAX_NAME = 128
MAX_VALUES = 4096
MAX_CAUSES = 256


def decode(frame: Frame) -> dict[str, Any]:
    """A report as reporter.py makes them. Raises WireError."""
    said = unpack(frame)
    for name in ("role", "kind"):
        _text(said, name)
    if said["kind"] not in KINDS:
        raise WireError(f"kind is {said['kind']!r}, expected one of {', '.join(KINDS)}")
    for name in ("t", "since"):
        _number(said.get(name), name)
    for name in ("pid", "lost", "unknown"):
        _count(said.get(name), name)
    _numbers(said, "waits", MAX_CAUSES)
    _text(said, "on")
    if said.get("cause") is not None:
        _text(said, "cause")
    if said["kind"] == "event":
        _text(said, "event")
        if not isinstance(said.get("fields"), dict):
            raise WireError("fields is no mapping")
    if said["kind"] == "metrics":
        _numbers(said, "values", MAX_VALUES, finite=False)
        if said.get("step") is not None:
            _count(said["step"], "step")
    return said


def _text(said: Mapping[str, Any], name: str) -> None:
    value = said.get(name)
    if not isinstance(value, str) or len(value) > (MAX_NAME if name != "on" else 4096):
        raise WireError(f"{name} is not a text of at most {MAX_NAME} characters")


def _number(value: Any, name: str, finite: bool = True) -> None:
    # A loss may be NaN, and the screen shall say so; a time may not.
    if not isinstance(value, int | float) or isinstance(value, bool) or (finite and not math.isfinite(value)):
        raise WireError(f"{name} is {value!r}, expected a number")


def _count(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise WireError(f"{name} is {value!r}, expected an integer >= 0")


def _numbers(said: Mapping[str, Any], name: str, most: int, finite: bool = True) -> None:
    value = said.get(name)
    if not isinstance(value, dict) or len(value) > most:
        raise WireError(f"{name} is not a mapping of at most {most} numbers")
    for key, number in value.items():
        if len(key) > MAX_NAME:
            raise WireError(f"{name} has a name of {len(key)} characters")
        _number(number, f"{name}.{key}", finite)
