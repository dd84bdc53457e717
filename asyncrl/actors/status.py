"""Reports what an actor waits for, and its metrics."""

from __future__ import annotations

import time

from asyncrl.actors.components import Components
from asyncrl.actors.concurrency import Concurrency
from asyncrl.actors.tickets import HeldTickets


class Status:
    def __init__(self, env_name: str, components: Components, tickets: HeldTickets, concurrency: Concurrency) -> None:
        self._env_name, self._tickets, self._concurrency = env_name, tickets, concurrency
        self._engine, self._updates, self._reporter = components.engine, components.updates, components.reporter
        self._keeper = components.keeper
        self.no_ticket = ""
        """The buffer's reason for issuing no ticket."""
        self._last_pause = (time.monotonic(), 0.0)

    def report(self) -> None:
        """Report what the actor waits for."""
        cause, on = self._cause()
        self._reporter.waiting(cause, on)

    def send_metrics(self) -> None:
        self._reporter.metrics(self._metrics())

    def _cause(self) -> tuple[str | None, str]:
        tickets = self._tickets
        if self._updates.loading:
            return "weights", ""
        if any(held.progress.phase == "generate" for held in tickets.playing.values()):
            return None, ""
        if tickets.calls.silent:
            return "buffer", "buffer"
        if tickets.playing:
            return "environment", self._env_name
        if tickets.putting:
            return "put", "buffer"
        return "ticket", f"buffer: {self.no_ticket}" if self.no_ticket else "buffer"

    def _metrics(self) -> dict[str, float]:
        """Series by name (tracking/series.py)."""
        stats, counts, limit = self._engine.load_stats(), self._tickets.counts, self._concurrency.slots
        now, paused_s = time.monotonic(), stats["paused_s"]
        then, paused_before = self._last_pause
        self._last_pause = now, paused_s
        return {
            "throughput/tokens_generated": stats["generated"],
            "throughput/tokens_wasted/aborted": float(counts.aborted_tokens),
            "throughput/episodes": float(counts.episodes),
            "throughput/prefix_breaks": float(counts.prefix_breaks),
            "throughput/begun_again": float(counts.begun_again),
            "throughput/compactions": float(counts.compactions),
            "throughput/compacted_from": float(counts.compacted_from),
            "throughput/compacted_to": float(counts.compacted_to),
            "throughput/ignored_constraints": float(counts.ignored_constraints),
            "throughput/requests_running": stats["running"],
            "throughput/requests_waiting": stats["waiting"],
            "throughput/slots": float(limit),
            "throughput/slots_busy": self._tickets.busy / limit,
            "throughput/kv_use": stats["kv_use"],
            **dict(counts.environments.series("throughput/environment_episodes", "throughput/environment_s")),
            **dict(counts.tools.series("throughput/tool_calls", "throughput/tool_s")),
            "buffer/renewals_failed": float(self._keeper.failed_rounds),
            "weights/held_version": float(self._engine.held_version[1]),
            "weights/load_s": self._updates.load_s,
            "weights/paused_share": min(1.0, (paused_s - paused_before) / max(now - then, 1e-9)),
            "weights/updates": float(self._updates.count),
        }
