"""Describes an exception of the user's code: its own words, with the file and line that raised it, and its cause."""

from __future__ import annotations

import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OUTAGES = ("ConnectionError", "TimeoutError", "gaierror", "TransportError", "APIConnectionError", "ServiceFailed")
"""Names of exception classes that mean that something does not answer, of the standard library, httpx, openai, aiohttp
and asyncrl; also every class whose name ends in one of them (`ClientConnectionError`)."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What made an attempt at an episode fail. Equal for failures of the same kind in the same place."""

    place: str
    outage: bool = False
    """Whether something did not answer, so that the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class UserError:
    text: str
    """`KeyError: 'ground_truth' (score.py, line 12, in score)`"""
    cause: Cause


def user_error(error: BaseException) -> UserError:
    """Describes `error`. The file and line are those of the innermost call in the user's code; without one, of asyncrl
    or a library. The words can be sent: half a surrogate pair, which may stand in a text or in the name of a file, is a
    question mark."""
    try:
        text = str(error)
    except BaseException as raised:  # the text of a foreign exception is foreign code, too
        text = f"(its text raised {type(raised).__name__})"
    words = f"{type(error).__name__}: {text}"
    frame = _frame(error)
    told = isinstance(error, SyntaxError) and not (error.filename or "<").startswith(
        "<"
    )  # its words name file and line
    where = f" ({_shown(frame.filename)}, line {frame.lineno}, in {frame.name})" if frame and not told else ""
    place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}" if frame else type(error).__name__
    return UserError(sendable(words + where), Cause(sendable(place), is_outage(error)))


def sendable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which no message can carry.

    >>> sendable("no tool \\ud800")
    'no tool ?'
    """
    return text.encode(errors="replace").decode()


def is_outage(error: BaseException | None) -> bool:
    """
    >>> is_outage(ConnectionRefusedError()), is_outage(TimeoutError()), is_outage(KeyError("a"))
    (True, True, False)
    """
    while error is not None:
        if any(kind.__name__.endswith(_OUTAGES) for kind in type(error).__mro__):
            return True
        error = error.__cause__
    return False


def _frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    for skipped in ((_PACKAGE, *_LIBRARIES), _LIBRARIES, ()):
        for frame in reversed(frames):
            if not frame.filename.startswith("<") and not _below(frame.filename, skipped):
                return frame
    return None


def _below(file: str, folders: tuple[str, ...]) -> bool:
    return any(file.startswith(f"{folder}/") for folder in folders)


def _shown(file: str) -> str:
    """The path as seen from the working folder."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
