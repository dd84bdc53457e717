"""CPU and memory of the run's processes, each with its children."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


class Usage:
    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float, float]] = {}

    def sample(self, pids: Mapping[str, int], now: float) -> dict[str, float]:
        """`system/cpu/{role}` (cores, since the last sample) and `system/rss_bytes/{role}` of processes that run."""
        values = {}
        for role, pid in pids.items():
            try:
                cpu_s, rss = _of_tree(pid, descend=role != "launcher")
            except psutil.Error:
                self._before.pop(role, None)
                continue
            values[f"system/rss_bytes/{role}"] = float(rss)
            before_pid, before_s, then = self._before.get(role, (0, 0.0, 0.0))
            if before_pid == pid and now > then:
                values[f"system/cpu/{role}"] = max(cpu_s - before_s, 0.0) / (now - then)
            self._before[role] = (pid, cpu_s, now)
        return values


def _of_tree(pid: int, descend: bool) -> tuple[float, int]:
    """CPU seconds and resident bytes. The launcher is counted without its children, which are the roles."""
    process = psutil.Process(pid)
    cpu_s, rss = 0.0, 0
    for each in (process, *(process.children(recursive=True) if descend else ())):
        try:
            with each.oneshot():
                times = each.cpu_times()
                cpu_s += times.user + times.system
                rss += each.memory_info().rss
        except psutil.NoSuchProcess:
            if each is process:
                raise
    return cpu_s, rss
