"""SandboxFusion's contract over HTTP: their service, or `asyncrl sandbox` on another machine."""

from __future__ import annotations

import asyncio

from asyncrl.rewards.http import ServiceFailed, post
from asyncrl.rewards.sandbox.contract import Result, Run, request_to_json, result_from_json

_GRACE_S = 30.0


class HttpSandbox:
    """An outage is a SandboxError, never a failure of the code."""

    def __init__(self, url: str, *, concurrency: int = 64, retries: int = 3) -> None:
        """`url`: without `/run_code`. `concurrency`: maximum of concurrent requests."""
        self._url = f"{url.rstrip('/')}/run_code"
        self._retries, self._concurrency = retries, concurrency
        self._slots: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = (None, asyncio.Semaphore())

    async def run(self, run: Run) -> Result:
        loop = asyncio.get_running_loop()
        if self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        try:
            async with self._slots[1]:
                timeout_s = 2 * run.run_timeout + _GRACE_S  # compiling has the same bound as running
                body = await post(self._url, request_to_json(run), timeout_s=timeout_s, retries=self._retries)
            return result_from_json(body)
        except (ServiceFailed, ValueError) as error:
            return Result("SandboxError", str(error))
