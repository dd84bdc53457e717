"""The status of a run, live or over, for `asyncrl status` and `Run.status()`."""

from __future__ import annotations

from typing import Any

from asyncrl.launch.preflight import living
from asyncrl.run_folder import RunFolder

STATUS_S = 10.0
"""Seconds that the buffer has to answer."""


def status(run: RunFolder) -> dict[str, Any]:
    """The run's processes; the buffer's status while it lives, else the summary. Raises RunError."""
    processes = living(run)
    report: dict[str, Any] = {"run": str(run.path), "processes": {str(pid): name for pid, name in processes.items()}}
    if "buffer" in processes.values():
        from asyncrl.buffer.client import BufferClient

        client = BufferClient(run.address("buffer"), identity="status", deadline_s=STATUS_S)
        try:
            report["buffer"] = client.status()
        finally:
            client.close()
    elif run.summary.is_file():
        report["summary"] = run.read_summary()
    return report
