"""Code run in a jail with tight limits."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from asyncrl.rewards.sandbox import LocalSandbox, Result, Run

TIGHT: dict[str, Any] = {
    "memory_mb": 128, "disk_mb": 8, "file_mb": 4, "processes": 12, "open_files": 32, "concurrency": 2,
}  # fmt: skip


def namespaces() -> bool:
    return subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces(), reason="this kernel gives no namespaces to this user")


def run(code: str, *, seconds: float = 10.0, **options: Any) -> Result:
    limits = {name: options.pop(name) for name in ("isolation", *TIGHT) if name in options}
    return LocalSandbox(**{**TIGHT, **limits}).run_now(Run(code, run_timeout=seconds, **options))
