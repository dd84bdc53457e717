"""The real buffer process, started, killed and restarted by a test."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.buffer.client import BufferClient
from asyncrl.config import Config
from asyncrl.run_folder import RunFolder

CONFIG: dict[str, Any] = {
    "learner": {"groups_per_step": 2, "group_size": 2, "steps": 1000, "ranks": 2, "backend": "fsdp2"},
    "buffer": {"capacity": 64, "max_staleness": 1},
    "eval": {"tasks": 2, "greedy": False},
}


class BufferProcess:
    def __init__(self, path: Path, **sections: Any) -> None:
        config = Config.model_validate(
            {name: CONFIG.get(name, {}) | sections.get(name, {}) for name in CONFIG | sections}
        )
        self.run = RunFolder.create(path, config)
        self.address = str(self.run.address("buffer"))
        self.log = path / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.clients: list[BufferClient] = []

    def start(self, max_file_bytes: int | None = None) -> None:
        def limit() -> None:
            if max_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.buffer", str(self.run.path)],
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                preexec_fn=limit,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def client(self, identity: str = "test", deadline_s: float = 60.0) -> BufferClient:
        self.clients.append(BufferClient(self.address, identity=identity, deadline_s=deadline_s))
        return self.clients[-1]

    def learner(self) -> tuple[BufferClient, int]:
        """A learner that has published version 0; with its incarnation."""
        client = self.client("learner")
        started = client.start(0, 0, None)
        if started.published < 0:
            client.published(started.incarnation, started.branch, 0, "digest-0")
        return client, started.incarnation

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.run.remove_temporary()
