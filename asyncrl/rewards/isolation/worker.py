"""`python -m asyncrl.rewards.isolation.worker FD`: runs a score in a process that can be killed.

takes: (import path, options, columns) from the socket, one at a time
gives: ("ok", result) or ("error", text)
ends:  with the socket, or with its parent, also while a score hangs
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

import msgpack

from asyncrl.plugins import resolve
from asyncrl.process.parent import end_with_parent


@functools.cache
def _score(path: str, options: bytes) -> Callable[..., Any]:
    score: Callable[..., Any] = resolve(path, None, "score")
    return functools.partial(score, **msgpack.unpackb(options))


def answer(message: bytes) -> bytes:
    path, options, columns = msgpack.unpackb(message)
    try:
        result = _score(path, options)(**columns)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return bytes(msgpack.packb(("ok", result), default=_number))
    except Exception as error:
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
        sys.path[:] = msgpack.unpackb(connection.recv_bytes())
        connection.send_bytes(b"ready")
        while True:
            connection.send_bytes(answer(connection.recv_bytes()))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
