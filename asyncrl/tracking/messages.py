"""Checks the report of a role before any of it is used. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.wire import Frame, WireError, unpack

KINDS = ("ready", "metrics", "waiting", "event", "spans")
MAX_NAME = 128
MAX_VALUES = 4096
MAX_CAUSES = 256
MAX_FIELDS = 64
MAX_SPANS = 1024
MAX_EVENT_BYTES = 64 << 10
"""Most bytes of a report with an event, which is written to a file as it is."""
MAX_MARK = 2**48
SECONDS = 2.0**33
"""Until the year 2242."""
BOUNDS = {"t": SECONDS, "since": SECONDS, "waits": SECONDS, "pid": 2**31 - 1, "lost": 2**53, "unknown": 2**53}
"""The largest value of each number; the least is 0, of seconds their negative, since a clock may be set back.
That of `step` is an argument; a value of a series, such as a loss, may be any number."""


def decode(frame: Frame, most_steps: int) -> dict[str, Any]:
    """A report made by reporter.py. `most_steps` bounds the steps in it. Raises WireError."""
    report = unpack(frame)
    for name in ("role", "kind"):
        _text(report, name)
    if report["kind"] not in KINDS:
        raise WireError(f"kind is {report['kind']!r}, expected one of {', '.join(KINDS)}")
    for name in ("t", "since"):
        _number(report.get(name), name, BOUNDS[name])
    for name in ("pid", "lost", "unknown"):
        _count(report.get(name), name, int(BOUNDS[name]))
    _numbers(report, "waits", MAX_CAUSES, BOUNDS["waits"])
    _text(report, "on")
    if report.get("cause") is not None:
        _text(report, "cause")
    if report["kind"] == "event":
        _event(report, len(frame))
    if report["kind"] == "spans":
        _spans(report.get("spans"))
    if report["kind"] == "metrics":
        _numbers(report, "values", MAX_VALUES, None)
        if report.get("step") is not None:
            _count(report["step"], "step", most_steps)
    return report


def _event(report: Mapping[str, Any], size: int) -> None:
    _text(report, "event")
    if not isinstance(report.get("fields"), dict) or len(report["fields"]) > MAX_FIELDS:
        raise WireError(f"fields is not a mapping of at most {MAX_FIELDS} entries")
    if size > MAX_EVENT_BYTES:
        raise WireError(f"an event has {size} bytes, at most {MAX_EVENT_BYTES} are taken")


def _spans(spans: Any) -> None:
    if not isinstance(spans, list) or len(spans) > MAX_SPANS:
        raise WireError(f"spans is not a list of at most {MAX_SPANS} spans")
    for span in spans:
        if not isinstance(span, list) or len(span) != 4:
            raise WireError("a span is not a list of name, end, seconds and mark")
        name, end, seconds, mark = span
        _text({"name of a span": name}, "name of a span")
        _number(end, "end of a span", SECONDS)
        _number(seconds, "seconds of a span", SECONDS)
        if mark is not None:
            _count(mark, "mark of a span", MAX_MARK)


def _text(report: Mapping[str, Any], name: str) -> None:
    value = report.get(name)
    if not isinstance(value, str) or len(value) > (MAX_NAME if name != "on" else 4096):
        raise WireError(f"{name} is not a text of at most {MAX_NAME} characters")


def _number(value: Any, name: str, most: float | None) -> None:
    """`most` is None for a value of a series: a loss may be NaN, which the screen shows."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise WireError(f"{name} is not a number")
    if most is not None and not -most <= value <= most:  # below 0: the clock was set back
        raise WireError(f"{name} is {value!r}, expected a number from {-most:g} to {most:g}")


def _count(value: Any, name: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise WireError(f"{name} is {str(value)[:50]}, expected an integer from 0 to {most}")


def _numbers(report: Mapping[str, Any], name: str, most: int, largest: float | None) -> None:
    value = report.get(name)
    if not isinstance(value, dict) or len(value) > most:
        raise WireError(f"{name} is not a mapping of at most {most} numbers")
    for key, number in value.items():
        if len(key) > MAX_NAME:
            raise WireError(f"{name} has a name of {len(key)} characters")
        _number(number, f"{name}.{key}", largest)
