"""What a config names and gives options, made: a source of tasks, a curriculum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.plugins import check_options, resolve


def opened(
    name: str,
    table: Mapping[str, Callable[..., Any]],
    field: str,
    options: Mapping[str, Any],
    options_field: str,
    given: Mapping[str, Any],
) -> Any:
    """What `name`, the value of `field`, means, called with `options` and with those of `given` that it has parameters
    for and that are no options. Raises ConfigError."""
    try:
        make: Callable[..., Any] = resolve(name, table, field)
        parameters = inspect.signature(make).parameters
        provided = {n: value for n, value in given.items() if n in parameters and n not in options}
        check_options(make, options, options_field, provided)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return make(**provided, **options)
