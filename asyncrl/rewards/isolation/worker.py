"""`python -m asyncrl.rewards.isolation.worker FD`: runs a score in a process that can be killed.

takes: (sys.path, import path, options, modules to import) from the socket, then columns, one call at a time
gives: ("ok", result) or ("error", text) for each; what it cannot load ends it
ends:  with the socket, or with its parent, also while a score hangs
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

import msgpack

from asyncrl.plugins import resolve
from asyncrl.process.parent import end_with_parent


def load(message: bytes) -> Callable[..., Any]:
    """The score of a recipe."""
    sys.path[:], path, options, modules = msgpack.unpackb(message)
    score: Callable[..., Any] = resolve(path, None, "score")
    for module in modules:
        importlib.import_module(module)
    return functools.partial(score, **options)


def answer(score: Callable[..., Any], message: bytes) -> bytes:
    try:
        result = score(**msgpack.unpackb(message))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return bytes(msgpack.packb(("ok", result), default=_number))
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> bytes:
    return bytes(msgpack.packb(("error", f"{type(error).__name__}: {error}")))


async def _awaited(result: Any) -> Any:
    return await result


def _number(value: Any) -> float:
    """Converts numpy's numbers, which msgpack does not know."""
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a score returned a {type(value).__name__}; expected numbers and text")


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    end_with_parent()
    try:
        recipe = connection.recv_bytes()
        try:
            score = load(recipe)
        except Exception as error:  # whatever the user's file raises
            connection.send_bytes(_told(error))
            return
        connection.send_bytes(msgpack.packb(("ok", None)))
        while True:
            connection.send_bytes(answer(score, connection.recv_bytes()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
