"""Where the time of episodes goes: environments and tools by the seconds that they took, from a run's metrics alone."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.tracking.state import Record


@dataclass(frozen=True, slots=True)
class Used:
    """What episodes waited for."""

    name: str
    times: float
    """Episodes of an environment, calls of a tool."""
    seconds: float
    """Seconds of all of them together."""

    @property
    def mean_s(self) -> float:
        return self.seconds / max(self.times, 1.0)


def environments(record: Record) -> list[Used]:
    """Environments in `record`, by the seconds that episodes spent in them, most first."""
    return _used(record, "throughput/environment_episodes/", "throughput/environment_s/")


def tools(record: Record) -> list[Used]:
    """Tools in `record`, by the seconds that their calls took together, most first."""
    return _used(record, "throughput/tool_calls/", "throughput/tool_s/")


def slowest(record: Record) -> str:
    """One sentence on the environment and the tool that took most of the time; empty if none is recorded.

    >>> slowest({"throughput/environment_episodes/shop": 10.0, "throughput/environment_s/shop": 40.0,
    ...          "throughput/tool_calls/search": 20.0, "throughput/tool_s/search": 30.0})
    'an episode spends 4 s in environment shop; tool search: 1.5 s a call, 75% of that time'
    """
    inside, called = environments(record), tools(record)
    if not inside:
        return ""
    total = sum(each.seconds for each in inside)
    slow = inside[0]
    said = f"an episode spends {slow.mean_s:.2g} s in environment {slow.name}"
    if len(inside) > 1:
        said += f", {slow.seconds / max(total, 1e-9):.0%} of the time in all {len(inside)}"
    if called:
        tool = called[0]
        said += f"; tool {tool.name}: {tool.mean_s:.2g} s a call, {tool.seconds / max(total, 1e-9):.0%} of that time"
    return said


def _used(record: Record, times: str, seconds: str) -> list[Used]:
    names = [name.removeprefix(seconds) for name in record if name.startswith(seconds)]
    found = [Used(name, record.get(times + name, 0.0), record[seconds + name]) for name in names]
    return sorted(found, key=lambda used: (-used.seconds, used.name))
