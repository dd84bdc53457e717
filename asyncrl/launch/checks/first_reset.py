"""Tries one `reset` of one task of each source, in a process of its own, before anything starts.

    launcher ── recipe and tasks, msgpack, stdin ──> python -m asyncrl.launch.checks.first_reset FD
             <── {"failed": first, or ""} ── FD       makes the environment, resets it, reads its tools, closes it

The recipe's options are those of the run's configuration file: texts, numbers, lists and mappings, and references to
environment variables, which the new process resolves as an actor does. What the environment prints goes to the
launcher's stderr. The process and its process group are killed at the end, also when the launcher dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.data.base import Task
from asyncrl.errors import ConfigError
from asyncrl.process import lifeline
from asyncrl.process.logs import setup
from asyncrl.redaction import hide, redact, resolved
from asyncrl.rendering.roles import template_of, unknown_role
from asyncrl.wire import pack, unpack

START_S = 120.0
"""Seconds for the user's imports and constructors, on a busy machine."""
MOST = 60_000
"""Bytes of the answer: fewer than a pipe holds, so that writing them never blocks."""
_CHARS = MOST // 12 - 10  # JSON writes a character as twelve bytes at most


def check_reset(config: Config, tasks: Sequence[Task]) -> None:
    """Raises ConfigError when the reset of one of `tasks` fails in each of `1 + env.retries` attempts."""
    env, attempts = config.env, 1 + config.env.retries
    recipe = {
        "name": env.name, "options": json.dumps(config.model_dump(mode="json")["env"]["options"]), "path": sys.path,
        "call_s": env.call_s, "attempts": attempts, "max_reward": env.max_reward,
        "template": template_of(config),
        "tasks": [dict(task) for task in tasks],
    }  # fmt: skip
    deadline_s = START_S + len(tasks) * attempts * (2 * env.call_s)
    failed = _run(pack(recipe), deadline_s)
    if failed is None:
        failed = f"it blocked for more than {deadline_s:.0f} s"
    if failed:
        raise ConfigError(
            f"env.name is {env.name!r}, and its trial reset failed: {failed}. Correct the environment, or set "
            "launch.try_reset false."
        )


def _run(recipe: bytes, deadline_s: float) -> str | None:
    """Why a reset failed, empty if none did; None: it did not end in time."""
    reading, writing = os.pipe()
    bound, ours = os.pipe()  # `ours` is closed with this process, however it ends
    command = [sys.executable, "-m", "asyncrl.launch.checks.first_reset", str(writing)]
    with os.fdopen(reading, "rb", buffering=0) as result, os.fdopen(ours, "wb", buffering=0):
        process = subprocess.Popen(
            command,
            env={**os.environ, lifeline.ENVIRONMENT: str(bound)},
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__,
            pass_fds=[writing, bound],
            start_new_session=True,
        )
        os.close(writing)
        os.close(bound)
        try:
            process.communicate(recipe, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # The answer was written before the process ended. The end of the pipe is not awaited: a child that the
        # environment forked, and that left the process group, still holds it.
        os.set_blocking(reading, False)
        text = result.read(MOST)
    if not text:
        return f"its process ended with exit code {process.returncode}"
    return str(json.loads(text)["failed"])


def main(fd: int) -> None:
    lifeline.bind_to_launcher()
    os.set_inheritable(fd, False)
    # What the environment logs goes to the terminal, without secrets.
    setup("first reset").root.setLevel(logging.WARNING)
    data = sys.stdin.buffer.read()
    recipe = unpack(data, len(data))
    sys.path[:] = recipe["path"]
    options = json.loads(recipe["options"])
    hide(options)
    try:
        recipe["options"] = resolved(options)
    except ValueError as error:
        failed = f"env.options: {error}"
    else:
        failed = asyncio.run(_first_failure(recipe))
    os.write(fd, json.dumps({"failed": redact(failed)[:_CHARS]}).encode())
    # Threads of the environment may not end.
    os._exit(0)


async def _first_failure(recipe: dict[str, Any]) -> str:
    from asyncrl.actors.envs import ENVIRONMENTS
    from asyncrl.actors.episodes.environment_calls import EpisodeFailed, GuardedEnv
    from asyncrl.plugins import resolve

    make = functools.partial(resolve(recipe["name"], ENVIRONMENTS, "env.name"), **recipe["options"])
    for task in recipe["tasks"]:
        for attempt in range(recipe["attempts"]):
            try:
                env = GuardedEnv(make, recipe["call_s"], recipe["max_reward"])
                try:
                    given = await env.reset({**task, "episode": 0})
                    env.tools  # noqa: B018 - raises where a tool is none
                finally:
                    await env.close()
                if strange := unknown_role(given, recipe["template"]):
                    return f"{strange} in the data, or in what reset gives (task {task['id']!r})"
                break
            except EpisodeFailed as failed:
                outage = failed.cause is not None and failed.cause.outage
                if attempt + 1 == recipe["attempts"] or outage:
                    return f"{failed.detail} (task {task['id']!r})"
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]))
