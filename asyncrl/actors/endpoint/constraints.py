"""Fields that constrain what the policy may sample: a form of the reply, or a tool that it must call.

A constrained sampler draws from another distribution than the policy that is trained, so no request is sampled under a
constraint. `actors.constraints` says whether such a request is refused or sampled freely.
"""

from __future__ import annotations

from typing import Any, Literal

from asyncrl.actors.endpoint.requests import CONSTRAINING, BadRequest, ChatBody

Constraints = Literal["refuse", "ignore"]
_SHOWN = 120


def constraints(chat: ChatBody) -> dict[str, Any]:
    """The fields of a request that constrain its sampling, with their values."""
    given = {name: getattr(chat, name, None) for name in CONSTRAINING}
    return {name: value for name, value in given.items() if value is not None and value not in CONSTRAINING[name]}


def refused(name: str, value: object) -> BadRequest:
    """The error for a constraint, `name` in the words of the request's protocol."""
    return BadRequest(
        f"{name} is {shown(value)}, which constrains sampling: what the policy samples is trained on, so it samples "
        "freely. Leave the field out, or set actors.constraints: ignore, under which the policy samples as if the "
        "field were not there, and the agent handles what comes.",
        param=name,
        code="unsupported_value",
    )


def shown(value: object) -> str:
    """`value`, cut to one line: a schema may be long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
