"""Checks the report of a role before any of it is used. Pure."""

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
    """A report made by reporter.py. Raises WireError."""
    report = unpack(frame)
    for name in ("role", "kind"):
        _text(report, name)
    if report["kind"] not in KINDS:
        raise WireError(f"kind is {report['kind']!r}, expected one of {', '.join(KINDS)}")
    for name in ("t", "since"):
        _number(report.get(name), name)
    for name in ("pid", "lost", "unknown"):
        _count(report.get(name), name)
    _numbers(report, "waits", MAX_CAUSES)
    _text(report, "on")
    if report.get("cause") is not None:
        _text(report, "cause")
    if report["kind"] == "event":
        _text(report, "event")
        if not isinstance(report.get("fields"), dict):
            raise WireError("fields is not a mapping")
    if report["kind"] == "metrics":
        _numbers(report, "values", MAX_VALUES, finite=False)
        if report.get("step") is not None:
            _count(report["step"], "step")
    return report


def _text(report: Mapping[str, Any], name: str) -> None:
    value = report.get(name)
    if not isinstance(value, str) or len(value) > (MAX_NAME if name != "on" else 4096):
        raise WireError(f"{name} is not a text of at most {MAX_NAME} characters")


def _number(value: Any, name: str, finite: bool = True) -> None:
    # A loss may be NaN, which the screen shows; a time may not.
    if not isinstance(value, int | float) or isinstance(value, bool) or (finite and not math.isfinite(value)):
        raise WireError(f"{name} is {value!r}, expected a number")


def _count(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise WireError(f"{name} is {value!r}, expected an integer >= 0")


def _numbers(report: Mapping[str, Any], name: str, most: int, finite: bool = True) -> None:
    value = report.get(name)
    if not isinstance(value, dict) or len(value) > most:
        raise WireError(f"{name} is not a mapping of at most {most} numbers")
    for key, number in value.items():
        if len(key) > MAX_NAME:
            raise WireError(f"{name} has a name of {len(key)} characters")
        _number(number, f"{name}.{key}", finite)
