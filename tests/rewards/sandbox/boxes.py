"""Code run in a jail with tight limits."""

from __future__ import annotations

import subprocess
from typing import Any

import psutil
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


def jails() -> list[str]:
    """What is left of any jail: its layers, and whatever runs as a user that only jails have."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        command, uids = process.info["cmdline"] or [], process.info["uids"]
        if any("jail.py" in word for word in command) or (uids and uids.real >= 2_000_000_000):
            found.append(f"{process.pid}: {' '.join(command)}")
    return found
