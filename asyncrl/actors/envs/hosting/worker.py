"""Hosts environments off the actor's event loop: a thread, or `python -m asyncrl.actors.envs.hosting.worker FD`.

takes: {"n", "env", "op": reset | step | snapshot | restore | close | cancel, "arg"} from the socket, any number at once
gives: {"n", "begun"} when a call begins, then {"n", "value"} or {"n", "error", "cause"}
ends:  with the socket; a process also with its parent

Both are one event loop each. A call that blocks delays the later calls here, but nothing in the actor.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import msgpack

from asyncrl.actors.envs.protocol import Env, EnvFailed
from asyncrl.actors.envs.resuming import told, way_of
from asyncrl.plugins import resolve
from asyncrl.process.daemon_threads import use_daemon_threads
from asyncrl.process.parent import end_with_parent
from asyncrl.user_errors import sendable, user_error

LENGTH = 4
"""Bytes of the length before each message."""


MAX_BYTES = 32 << 20
"""Largest message."""


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises IncompleteReadError at the end, and OSError for what is no message."""
    length = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if length > MAX_BYTES:
        raise OSError(f"a message of {length} bytes, more than {MAX_BYTES}")
    packed = await reader.readexactly(length)
    try:
        return msgpack.unpackb(packed)
    except ValueError as error:
        raise OSError(f"no message: {error}") from error


def message(content: Any) -> bytes:
    """`content` as bytes. Raises TypeError for anything but plain data and numbers, ValueError for too much of it."""
    packed: bytes = msgpack.packb(content, default=_number)
    if len(packed) > MAX_BYTES:
        raise ValueError(f"{len(packed)} bytes, more than {MAX_BYTES} bytes, cannot pass between actor and worker")
    return len(packed).to_bytes(LENGTH, "big") + packed


def maker(name: str, options: Mapping[str, Any]) -> Callable[[], Env]:
    """A function that makes an environment per episode."""
    from asyncrl.actors.envs import ENVIRONMENTS

    return functools.partial(resolve(name, ENVIRONMENTS, "env.name"), **options)


async def serve(ours: socket.socket) -> None:
    """Serve environments until the other side closes."""
    use_daemon_threads()
    reader, writer = await asyncio.open_connection(sock=ours)
    try:
        name, options, sys.path[:] = await read(reader)
        host = _Host(maker(name, options), writer)
        writer.write(message({"ready": True}))
        while True:
            host.take(await read(reader))
    except (asyncio.IncompleteReadError, OSError):
        return
    finally:
        writer.close()


_ERROR_CHARS = 4000


class _Host:
    def __init__(self, make: Callable[[], Env], writer: asyncio.StreamWriter) -> None:
        self._make, self._writer = make, writer
        self._envs: dict[int, Env] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    def take(self, request: Mapping[str, Any]) -> None:
        n = request["n"]
        if request["op"] != "cancel":
            self._calls[n] = asyncio.ensure_future(self._answer(n, request))
        elif n in self._calls:
            self._calls[n].cancel()

    async def _answer(self, n: int, request: Mapping[str, Any]) -> None:
        self._writer.write(message({"n": n, "begun": True}))
        try:
            value = await self._call(request["env"], request["op"], request["arg"])
            reply = message({"n": n, "value": value})
        except asyncio.CancelledError:
            reply = message({"n": n, "error": "it was cancelled"})
        except SystemExit as error:
            reply = message({"n": n, "error": sendable(f"it called sys.exit({error.code!r})"[:_ERROR_CHARS])})
        except BaseException as error:  # here, too, it costs its episode only
            described = user_error(error)
            cause = [described.cause.place, described.cause.outage]
            reply = message({"n": n, "error": described.text[:_ERROR_CHARS], "cause": cause})
        finally:
            del self._calls[n]
        self._writer.write(reply)

    async def _call(self, number: int, op: str, arg: Any) -> Any:
        if op == "reset":
            env = self._envs[number] = self._make()
            return await _reset(env, *arg)
        if op == "close":
            if number in self._envs:
                await self._envs.pop(number).close()
            return None
        if op in ("snapshot", "restore"):
            given = () if op == "snapshot" else (arg,)
            return await getattr(self._envs[number], op)(*given)
        turn = await self._envs[number].step(arg)
        told = ("messages", "reward", "done", "metrics", "rewards", "state", "calls")
        return {name: getattr(turn, name) for name in told}


async def _reset(env: Any, task: Mapping[str, Any], interrupted: dict[str, Any] | None) -> dict[str, Any]:
    """What the actor learns of a reset."""
    messages = list(await env.reset(task, **told(env, interrupted)))
    tools = [[tool.name, tool.schema] for tool in env.tools]
    state = getattr(env, "reset_state", None)
    told_back = {"messages": messages, "tools": tools, "reset_state": state}
    try:
        return told_back | {"resumed_by": way_of(env)}
    except EnvFailed as error:  # fails the episodes that ask for it, which are those with durable turns
        return told_back | {"resumed_by": "none", "half": sendable(str(error)[:_ERROR_CHARS])}


def _number(value: Any) -> float:
    """A number of numpy, which msgpack does not support, as a float."""
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"an environment gave a {type(value).__name__}, which cannot leave its worker: expected numbers, text, lists "
        "and mappings, or env.workers async"
    )


def main() -> None:
    end_with_parent()
    ours = socket.socket(fileno=int(sys.argv[1]))
    asyncio.run(serve(ours))


if __name__ == "__main__":
    main()
