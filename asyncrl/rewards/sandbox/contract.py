"""One run of untrusted code: what is asked, what comes back; as JSON it is SandboxFusion's `POST /run_code`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Run:
    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files by path, relative to the folder that the code runs in."""
    fetch_files: tuple[str, ...] = ()
    """Files to return, if they exist."""
    run_timeout: float = 10.0
    """Wall-clock seconds."""
    memory_limit_mb: int = -1
    """-1: the sandbox's own limit."""


@dataclass(frozen=True, slots=True)
class Ran:
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None
    """Negative: the signal that killed it."""
    stdout: str
    stderr: str
    execution_time: float | None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Result:
    status: Literal["Success", "Failed", "SandboxError"]
    """Failed: caused by the code (it did not compile, did not exit with 0, was killed at a limit). SandboxError: caused
    by the sandbox; the same run may succeed another time."""
    message: str = ""
    run: Ran | None = None
    compiled: Ran | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


class Sandbox(Protocol):
    async def run(self, run: Run) -> Result:
        """Run the code; never raises for what it does. Returns within `run_timeout` and a few seconds."""
        ...


_LARGEST = 1e9
"""Bound of every number of a request."""


class SandboxFailed(Exception):
    """A SandboxError as an exception: an outage, which the code did not cause."""


def request_to_json(run: Run) -> dict[str, Any]:
    return {
        "code": run.code,
        "language": run.language,
        "stdin": run.stdin,
        "files": {name: base64.b64encode(data).decode() for name, data in run.files.items()},
        "fetch_files": list(run.fetch_files),
        "run_timeout": run.run_timeout,
        "compile_timeout": run.run_timeout,
        "memory_limit_MB": run.memory_limit_mb,
    }


def request_from_json(body: Any) -> Run:
    """Raises ValueError naming the field."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        raise ValueError("expected a JSON object with `code`, a text")
    kinds: dict[str, Any] = {
        "language": str, "stdin": str, "files": dict, "fetch_files": list, "run_timeout": int | float,
        "memory_limit_MB": int,
    }  # fmt: skip
    given = {name: value for name, value in body.items() if name in kinds and value is not None}
    for name, value in given.items():
        _check_value(name, value, kinds[name])
    for name in ("code", "stdin"):
        _check_text(name, body.get(name) or "")
    try:
        files = {str(name): base64.b64decode(data, validate=True) for name, data in given.get("files", {}).items()}
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"files: expected base64 texts: {error}") from error
    return Run(
        code=body["code"],
        language=given.get("language", "python"),
        stdin=given.get("stdin", ""),
        files=files,
        fetch_files=tuple(map(str, given.get("fetch_files", ()))),
        run_timeout=float(given.get("run_timeout", 10.0)),
        memory_limit_mb=given.get("memory_limit_MB", -1),
    )


def _check_value(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.80}: expected {kind}")
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{name} is {value!r:.80}: expected a number up to {_LARGEST:g}")


def _check_text(name: str, text: str) -> None:
    """Raises ValueError for half of a surrogate pair, which JSON can hold and no file."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no text: {error}") from error


def result_to_json(result: Result) -> dict[str, Any]:
    def ran(part: Ran | None) -> dict[str, Any] | None:
        names = ("status", "return_code", "stdout", "stderr", "execution_time")
        return None if part is None else {name: getattr(part, name) for name in names}

    return {
        "status": result.status,
        "message": result.message,
        "compile_result": ran(result.compiled),
        "run_result": ran(result.run),
        "executor_pod_name": None,
        "files": {name: base64.b64encode(data).decode() for name, data in result.files.items()},
    }


def result_from_json(body: Any) -> Result:
    """Raises ValueError if this violates the contract."""

    def ran(part: Any) -> Ran | None:
        if part is None:
            return None
        return Ran(
            part["status"], part.get("return_code"), part.get("stdout") or "", part.get("stderr") or "",
            part.get("execution_time"),
        )  # fmt: skip

    try:
        if body["status"] not in ("Success", "Failed", "SandboxError"):
            raise ValueError(f"status {body['status']!r}")
        files = {name: base64.b64decode(data) for name, data in (body.get("files") or {}).items()}
        return Result(
            body["status"], body.get("message") or "", ran(body.get("run_result")), ran(body.get("compile_result")),
            files,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no answer of a sandbox: {type(error).__name__}: {error}: {body!r:.200}") from error
