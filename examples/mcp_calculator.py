"""A small MCP server, and tasks for it: the policy learns to call its tool.

asyncrl launch --config configs/mcp.yaml
"""

from __future__ import annotations

import random
from typing import Any

from asyncrl.actors.envs.calculator import calculate


def task(rng: random.Random) -> dict[str, Any]:
    """One question, with the answer for `exact_match`."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return {"prompt": f"Work out {a} + {b}", "ground_truth": str(a + b)}


if __name__ == "__main__":
    from mcp.server import MCPServer

    server = MCPServer("calculator")
    server.tool()(calculate)
    server.run("stdio")
