"""Rules of `launch.tuning` that span several fields."""

from __future__ import annotations

from asyncrl.config.tree import Tree


def of_tuning(c: Tree) -> list[str]:
    """What `launch.tuning: auto` cannot work with, one sentence each."""
    if c.launch.tuning == "off":
        return []
    problems = [
        f"launch.tuning is auto and {field} {value}, which leaves nothing to choose: leave out {field}, and bound what "
        f"is chosen by {limit}, or set launch.tuning off."
        for field, value, limit in (
            ("buffer.max_staleness", c.buffer.max_staleness, "buffer.staleness_limit"),
            ("actors.slots", c.actors.slots, "actors.max_slots"),
        )
        if value != "auto"
    ]
    if c.env.group_score:
        problems.append(
            f"launch.tuning is auto and env.group_score {c.env.group_score!r}: an actor that holds the whole group "
            "until it is scored cannot be given fewer slots. Set launch.tuning off; buffer.max_staleness may be auto."
        )
    return problems
