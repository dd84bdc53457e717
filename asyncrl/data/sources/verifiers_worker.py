"""Runs under the Python that has verifiers (it needs nothing of asyncrl): one JSON per line in, one per line out.

    python -P verifiers_worker.py CONFIG tasks SIZE     prints a list of {"id", "prompt"}, and ends
    python -P verifiers_worker.py CONFIG play           {"n", "index", "base_url"} -> {"n", "result"} or {"n", "error"}

CONFIG: verifiers' configuration of a single-agent environment as JSON, with `taskset: {id: ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

API_KEY_VAR = "ASYNCRL_VERIFIERS_KEY"
"""verifiers reads keys from environment variables. Any value works, because the secret is in the URL."""

OTHER_VERSION = "another version of verifiers is installed: "
"""Begins the last line that a worker writes which does not find what it imports; the source looks for it."""


def installed() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("verifiers")
    return "one without metadata"


def environment(config: dict[str, Any]) -> Any:
    try:
        from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig
    except ImportError as error:
        missing = error.name or ""
        if not missing.startswith("verifiers") or (missing == "verifiers" and isinstance(error, ModuleNotFoundError)):
            raise
        sys.exit(f"{OTHER_VERSION}{installed()} ({error})")
    return SingleAgentEnv(SingleAgentEnvConfig(**config))


def listed(tasks: Iterator[Any], size: int) -> list[dict[str, Any]]:
    rows = []
    for index, task in enumerate(itertools.islice(tasks, size)):
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt") or ""
        rows.append({"id": str(data.get("id") or index), "prompt": prompt})
    return rows


def use_this_python() -> None:
    """Run the script of the null and bash harnesses with this Python, which has its packages, so that uv need not
    download them."""
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    source = CHAT_PROGRAM_SOURCE.encode()
    path = Path(SubprocessRuntime.scripts_dir) / f"{hashlib.sha256(source).hexdigest()}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(source)
    partial.replace(path)
    SubprocessRuntime._interpreters[str(path)] = sys.executable


class Player:
    def __init__(self, env: Any, out: Any) -> None:
        self._env, self._out = env, out
        self._tasks: list[Any] = []
        self._rest = iter(env.taskset)

    async def play(self, wish: dict[str, Any]) -> None:
        try:
            rewards = await self._rewards(wish["index"], wish["base_url"])
            answer: dict[str, Any] = {"n": wish["n"], "result": rewards}
        except Exception as error:
            answer = {"n": wish["n"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=self._out, flush=True)

    async def _rewards(self, index: int, base_url: str) -> dict[str, float]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        while len(self._tasks) <= index:
            self._tasks.append(next(self._rest))
        client = EvalClientConfig(base_url=base_url, api_key_var=API_KEY_VAR)
        episode = await self._env.run_episode(self._tasks[index], ModelContext(model="policy", client=client))
        errors = [error for holder in (episode, *episode.traces) for error in holder.errors]
        if errors:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}")
        (trace,) = episode.traces
        if not trace.rewards:
            raise RuntimeError("the taskset gave no reward")
        return {name: float(reward.value) for name, reward in trace.rewards.items()}


async def serve(config: dict[str, Any], out: Any) -> None:
    env = environment(config)
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing = set()
    async with env.serving():
        print(json.dumps({"ready": True}), file=out, flush=True)
        player = Player(env, out)
        while line := await lines.readline():
            task = asyncio.create_task(player.play(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def main() -> None:
    # Output of tasksets must not mix with the lines of the protocol.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ[API_KEY_VAR] = "asyncrl"
    config, what = json.loads(sys.argv[1]), sys.argv[2]
    if what == "tasks":
        print(json.dumps(listed(iter(environment(config).taskset), int(sys.argv[3]))), file=out, flush=True)
        return
    use_this_python()
    asyncio.run(serve(config, out))


if __name__ == "__main__":
    main()
