"""Which processes a run consists of, and the command of each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from asyncrl.config import Config
from asyncrl.launch.placement import of
from asyncrl.launch.processes import Role, python
from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import channel


def roles(run: RunFolder, config: Config, *, resume: bool, fresh: Path | None = None) -> list[Role]:
    """The processes of a run, in the order in which they start. `fresh`: the checkpoint where a new branch begins."""
    folder = str(run.path)
    started = [
        Role("buffer", python("asyncrl.buffer", folder), environment=_threads(1)),
        *(_learner(folder, config, rank, resume=resume, fresh=fresh) for rank in range(config.learner.ranks)),
        *(actor(run, config, f"actor-{i}") for i in range(config.actors.count)),
    ]
    if (server := channel(config).server) is not None:
        started.insert(1, Role("weights", python(server, folder), environment=_threads(1)))
    return [replace(role, cpus=of(config.launch.cpus, role.name) or ()) for role in started]


def actor(run: RunFolder, config: Config, name: str) -> Role:
    command = python("asyncrl.actors", str(run.path), "--name", name)
    return Role(name, command, (), _threads(config.actors.threads), of(config.launch.cpus, name) or ())


def _learner(folder: str, config: Config, rank: int, *, resume: bool, fresh: Path | None) -> Role:
    first = python("asyncrl.learner", folder, *(("--rank", str(rank)) if rank else ()))
    again = (*first, "--resume")
    begin = again if resume else first
    if fresh is not None:
        begin = (*again, "--fresh", str(fresh))
    environment = _threads(config.learner.threads)
    if config.learner.ranks > 1:  # they are on one host, whose name may lead anywhere
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    name, leader = (f"learner-{rank}", "learner") if rank else ("learner", "")
    return Role(name, begin, again, environment, leader=leader)


def _threads(n: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    # Progress bars would fill the logs.
    return {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", **dict.fromkeys(names, str(n))}
