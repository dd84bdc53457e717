"""The processes of a run: the command and the environment of each. Pure."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.config import Config
from asyncrl.config.teacher import scorer_names
from asyncrl.launch.placement.demand import reserved, setting
from asyncrl.launch.placement.resources import interfaces
from asyncrl.launch.processes import Role, python, threads
from asyncrl.process.gpus import GIVEN
from asyncrl.run_folder import RunFolder
from asyncrl.weights.channels import server


def roles(run: RunFolder, config: Config, *, resume: bool) -> list[Role]:
    """The roles of a run, in the order in which they start."""
    folder = str(run.path)
    started = [
        Role("buffer", python("asyncrl.buffer", folder), environment=threads(1)),
        *(_learner(folder, config, rank, resume=resume) for rank in range(config.learner.ranks)),
        *(_scorer(folder, config, name) for name in scorer_names(config)),
        *(actor(run, config, f"actor-{i}") for i in range(config.actors.count)),
    ]
    if (module := server(config)) is not None:
        started.insert(1, Role("weights", python(module, folder), environment=threads(1)))
    return [replace(role, cpus=setting(config.launch.cpus, role.name) or ()) for role in started]


def actor(run: RunFolder, config: Config, name: str) -> Role:
    command = python("asyncrl.actors", str(run.path), "--name", name)
    environment = threads(config.actors.threads) | _given(config, name)
    return Role(name, command, (), environment, setting(config.launch.cpus, name) or ())


def _scorer(folder: str, config: Config, name: str) -> Role:
    return Role(name, python("asyncrl.scorer", folder, "--name", name), environment=threads(1) | _given(config, name))


def _learner(folder: str, config: Config, rank: int, *, resume: bool) -> Role:
    first = python("asyncrl.learner", folder, *(("--rank", str(rank)) if rank else ()))
    again = (*first, "--resume")
    begin = again if resume else first
    name, leader = (f"learner-{rank}", "learner") if rank else ("learner", "")
    environment = threads(config.learner.threads) | interfaces(config) | _given(config, name)
    return Role(name, begin, again, environment, leader=leader)


def _given(config: Config, name: str) -> dict[str, str]:
    """What the process compares with the GPUs that it sees. On one machine the launcher's placement says it."""
    gpus = reserved(name, config) if config.launch.backend == "ray" else 0.0
    return {GIVEN: str(max(1, int(gpus)))} if gpus else {}
