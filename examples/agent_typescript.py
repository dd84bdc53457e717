"""Plays an episode with an agent in TypeScript, with the openai package: examples/typescript/agent.ts.

    npm install --prefix examples/typescript
    asyncrl launch --config configs/agent-openai.yaml --env.name examples/agent_typescript.py:agent --actors.slots 8

A process per episode takes about 0.4 s of a core to start; one that stays and takes episodes from a queue does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any


async def agent(
    task: Mapping[str, Any], client: Any, *, max_turns: int = 6, folder: str = "examples/typescript"
) -> dict[str, float]:
    """The reward that the program wrote. `folder`: holds agent.ts and its node_modules."""
    episode = {"baseURL": str(client.base_url), "apiKey": client.api_key, "maxTurns": max_turns, "task": dict(task)}
    pipe = asyncio.subprocess.PIPE
    node = await asyncio.create_subprocess_exec(
        "node", "--import", "tsx", "agent.ts", cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        written, errors = await node.communicate(json.dumps(episode).encode())
    finally:
        with contextlib.suppress(ProcessLookupError):
            node.kill()
    if node.returncode != 0:
        raise RuntimeError(f"agent.ts ended with {node.returncode}: {errors.decode()[-500:]}")
    reward: dict[str, float] = json.loads(written)
    return reward
