"""How an environment goes on with an episode that another process began (docs/how-to/long-episodes.md).

snapshot   it has `snapshot` and `restore`: the state behind an answer is stored with it, and restored
replay     `replayable = True`: the recorded actions are stepped again, and the answers compared
told       `reset` takes `interrupted`: the episode begins again, and reset is told the action that was interrupted
none       the episode begins again
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from asyncrl.actors.envs.protocol import EnvFailed, Message
from asyncrl.trajectory.turns import Snapshot

Way = Literal["snapshot", "replay", "told", "none"]
WAYS: tuple[Way, ...] = ("snapshot", "replay", "told", "none")


def way_of(env: Any) -> Way:
    """What `env` declares. One that stands for another (a worker, a mix) has that one's in `resumed_by`, once `reset`
    has returned. Raises EnvFailed for half a pair of methods.

    >>> class Counter:
    ...     replayable = True
    >>> way_of(Counter()), way_of(object())
    ('replay', 'none')
    """
    named = getattr(env, "resumed_by", None)
    if named is not None:
        if named not in WAYS:
            raise EnvFailed(f"resumed_by is {named!r}, expected one of {', '.join(WAYS)}")
        return named  # type: ignore[no-any-return]
    given = [callable(getattr(env, method, None)) for method in ("snapshot", "restore")]
    if given[0] != given[1]:
        has, lacks = ("snapshot", "restore") if given[0] else ("restore", "snapshot")
        raise EnvFailed(f"it has {has} and no {lacks}: write both, or neither")
    if all(given):
        return "snapshot"
    replayable = getattr(env, "replayable", False)
    if not isinstance(replayable, bool):
        raise EnvFailed(f"replayable is {replayable!r}, expected True or False")
    if replayable:
        return "replay"
    return "told" if takes_interrupted(env) else "none"


def told(env: Any, interrupted: Message | None) -> dict[str, Message]:
    """The keyword arguments of `reset` for the action that was interrupted: none, unless the environment is to know, or
    stands for one that may."""
    if interrupted is None:
        return {}
    stands_for_another = getattr(env, "resumed_by", None) is not None
    tell = takes_interrupted(env) if stands_for_another else way_of(env) == "told"
    return {"interrupted": interrupted} if tell else {}


def takes_interrupted(env: Any) -> bool:
    """Whether `reset` has a parameter for it."""
    return "interrupted" in inspect.signature(env.reset).parameters


def checked_snapshot(state: Any, most: int) -> Snapshot | None:
    """What `snapshot` returned. Raises EnvFailed unless it is bytes, a text or None, of at most `most` bytes."""
    if state is None:
        return None
    if not isinstance(state, bytes | str):
        raise EnvFailed(f"it gave a {type(state).__name__}, expected bytes, a reference as a text, or None")
    try:
        size = len(state.encode() if isinstance(state, str) else state)
    except UnicodeEncodeError as error:
        raise EnvFailed(f"it gave a text that is no Unicode: {error}; give bytes") from error
    if size > most:
        raise EnvFailed(
            f"it gave {size} bytes, at most {most} are stored with a turn: raise buffer.turn_max_kb, or keep the state "
            "elsewhere and give a reference to it"
        )
    return state
