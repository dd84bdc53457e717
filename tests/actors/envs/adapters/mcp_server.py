"""A real MCP server: `python mcp_server.py` over stdio, `python mcp_server.py PORT` over HTTP on loopback."""

from __future__ import annotations

import os
import sys

from mcp.server import MCPServer

server = MCPServer("store")


@server.tool()
def lookup(key: str) -> str:
    """Look up a key in the store."""
    if key == "poison":
        os._exit(1)
    return {"sun": "41", "moon": "17"}[key]


@server.tool()
def process() -> str:
    """The process that serves this."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
