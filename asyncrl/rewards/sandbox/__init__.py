"""Runs untrusted code in isolation: on this machine, or by a service with SandboxFusion's contract."""

from __future__ import annotations

from typing import Any

from asyncrl.plugins import check_options
from asyncrl.rewards.sandbox.contract import Ran, Result, Run, Sandbox, SandboxFailed
from asyncrl.rewards.sandbox.local import LocalSandbox
from asyncrl.rewards.sandbox.remote import HttpSandbox

__all__ = ["HttpSandbox", "LocalSandbox", "Ran", "Result", "Run", "Sandbox", "SandboxFailed", "open_sandbox"]


def open_sandbox(options: dict[str, Any] | None) -> Sandbox:
    """The sandbox of `options`: with `url` a service, otherwise the local one. One object per process and options.

    Raises ValueError for options that it does not know.
    """
    key = repr(sorted((options or {}).items()))
    if key not in _opened:
        kind = HttpSandbox if options and "url" in options else LocalSandbox
        check_options(kind, options or {}, "sandbox")
        _opened[key] = kind(**(options or {}))
    return _opened[key]


_opened: dict[str, Sandbox] = {}
