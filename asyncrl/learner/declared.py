"""Properties that a function of a table declares about itself, by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Properties = TypeVar("Properties")

_ATTRIBUTE = "asyncrl_properties"


def declare(properties: object) -> Callable[[Function], Function]:
    """The decorator that attaches `properties` to a function."""

    def attach(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, properties)
        return function

    return attach


def declared(function: Callable[..., Any], default: Properties) -> Properties:
    """What the function declares, or `default` for a function that declares nothing of that kind."""
    properties = getattr(function, _ATTRIBUTE, None)
    return properties if isinstance(properties, type(default)) else default
