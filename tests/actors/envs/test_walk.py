"""The example whose environment rewards each turn and names its states."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncrl.plugins import resolve

WALK = f"{Path(__file__).parents[3]}/examples/walk.py:Walk"


def walked(*said: str, seed: int = 0, **options: Any) -> list[Any]:
    """The state at the reset, then each answer."""

    async def episode() -> list[Any]:
        env = resolve(WALK, None, "env.name")(**options)
        await env.reset({"id": "0", "prompt": "Walk.", "seed": seed})
        return [env.reset_state, *[await env.step({"role": "assistant", "content": text}) for text in said]]

    return asyncio.run(episode())


def test_a_step_that_is_wasted_costs_its_turn_and_leaves_the_state() -> None:
    start, bump, right, back = walked("up", "?r", "l", holes=0)
    assert [turn.reward for turn in (bump, right, back)] == [-0.1, 0.0, 0.0]
    assert bump.state == back.state == start != right.state


def test_it_ends_at_the_goal_and_in_a_hole() -> None:
    *_, last = walked(*"ddrr", size=3, holes=0)
    assert (last.reward, last.done, last.rewards) == (1.0, True, {"arrived": 1.0})
    _, first = walked("d", size=2, holes=2)
    assert (first.reward, first.done) == (-0.5, True)
