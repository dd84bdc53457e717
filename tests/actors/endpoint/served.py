"""An endpoint in a process of its own, under 1,024 open files: `python -m tests.actors.endpoint.served`. It prints the
base URL of an episode, and ends with its standard input."""

from __future__ import annotations

import asyncio
import resource
import sys
from types import SimpleNamespace
from typing import Any, cast

from asyncrl.actors.endpoint import open_connections
from asyncrl.actors.endpoint.server import EndpointServer


async def serve() -> None:
    async with EndpointServer("policy", 200) as server:
        with server.open(cast(Any, SimpleNamespace(histories={}))) as url:  # no request of the tests gets to the model
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard if hard == resource.RLIM_INFINITY else max(1024, hard)))
    open_connections.HEAD_S, open_connections.BODY_S = float(sys.argv[1]), float(sys.argv[2])
    asyncio.run(serve())
