"""CPU and memory of the run's processes, each with its children."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psutil


class Usage:
    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float, float]] = {}

    def sample(self, pids: Mapping[str, int], now: float) -> dict[str, float]:
        """`system/cpu/{role}` (cores, since the last sample) and `system/rss_bytes/{role}` of processes that run."""
        values = {}
        below, found = _by_parent(), dict[int, tuple[float, int]]()
        for role, pid in pids.items():
            try:
                if role == "launcher":  # its children are the roles
                    cpu_s, rss = _of_tree(pid, {})
                else:
                    cpu_s, rss = found[pid] = found.get(pid) or _of_tree(pid, below)
            except psutil.Error:
                self._before.pop(role, None)
                continue
            values[f"system/rss_bytes/{role}"] = float(rss)
            before_pid, before_s, then = self._before.get(role, (0, 0.0, 0.0))
            if before_pid == pid and now > then:
                values[f"system/cpu/{role}"] = max(cpu_s - before_s, 0.0) / (now - then)
            self._before[role] = (pid, cpu_s, now)
        return values


def _by_parent() -> dict[int, list[psutil.Process]]:
    """All processes by the pid of their parent: one look at the system, however many roles there are."""
    found = defaultdict[int, list[psutil.Process]](list)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found[process.ppid()].append(process)
    return found


def _of_tree(pid: int, below: Mapping[int, Sequence[psutil.Process]]) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process and all below it."""
    process = psutil.Process(pid)
    cpu_s, rss, waiting, seen = 0.0, 0, [process], {pid}
    while waiting:
        each = waiting.pop()
        waiting += [child for child in below.get(each.pid, ()) if child.pid not in seen]
        seen.update(child.pid for child in waiting)
        try:
            with each.oneshot():
                times = each.cpu_times()
                cpu_s += times.user + times.system
                rss += each.memory_info().rss
        except psutil.NoSuchProcess:
            if each is process:
                raise
    return cpu_s, rss
