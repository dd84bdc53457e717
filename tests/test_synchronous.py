"""`buffer.max_staleness: 0` is the synchronous trainer: the real processes against a plain loop, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.actors.engines import build_engine
from asyncrl.actors.episodes.episode import play
from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
from asyncrl.actors.player import environment
from asyncrl.audit.ledger import LedgerRows
from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.buffer.tasks.sources import open_source, ticket_seed
from asyncrl.config import Config
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.learner.__main__ import compute_alike
from asyncrl.learner.backends.hf.torch import TorchBackend
from asyncrl.learner.batch import flatten
from asyncrl.learner.checkpoints.checkpoints import complete, group_digests, read_list
from asyncrl.learner.objective.objective import Objective
from asyncrl.learner.step.train_step import train_step
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Ticket, TicketId, Trajectory
from asyncrl.weights.protocol import WeightsVersion

STEPS, GROUPS, SIZE = 3, 2, 4
DEADLINE_S = 300.0
SECTIONS: dict[str, Any] = {
    "model": {"path": "quickstart"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256},
    "actors": {"slots": 1, "max_new_tokens": 48, "threads": 1},
    "buffer": {"max_staleness": 0, "capacity": 64, "keep": "all"},
    "learner": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "lr": 1e-3, "threads": 1},
    "eval": {"tasks": 0},
    "launch": {"seed": 1, "name": "run"},
}


@dataclass(frozen=True)
class Step:
    """What one training step consumed."""

    groups: tuple[int, ...]
    tasks: tuple[str, ...]
    trajectories: dict[tuple[int, int], str]
    """Digest by (group, index)"""
    group_digests: dict[int, str]


@dataclass(frozen=True)
class Synchronous:
    steps: list[Step]
    gradients: list[float]
    """Norm per step: 0 would be a step without anything to compare."""
    most_turns: int
    weights: dict[str, torch.Tensor]


class Copied:
    """The learner's weights as an engine takes them."""

    def __init__(self, backend: TorchBackend, version: int) -> None:
        self.id = WeightsVersion(0, version, "")
        self._backend = backend

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._backend.weights()

    def close(self) -> None: ...


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled


async def synchronous_loop(config: Config) -> Synchronous:
    """Generate a batch, train on it, copy the weights: no process, no socket, no buffer."""
    compute_alike(config)
    backend, objective = TorchBackend(config), Objective(config.learner)
    engine, renderer, limits = build_engine(config), TemplateRenderer.of(config), EpisodeLimits.of(config)
    source, make_env = open_source(config), environment(config)

    async def episode(group: int, index: int, version: int) -> Trajectory:
        seed = ticket_seed(config.actors.seed, "train", 0, group, index, 0)
        task, temperature = source.task(group), config.actors.temperature
        ticket = Ticket(TicketId(0, group, index), 0, "train", task, (0, version), SIZE, temperature, seed, 30.0)
        progress = Progress(time.monotonic())
        result = await play(ticket, make_env, engine, renderer, limits, progress)
        return result.trajectory(ticket, progress, actor="me", env_name=config.env.name)

    await engine.start()
    steps, gradients, most_turns = [], [], 0
    for version in range(STEPS):
        await engine.pause(recompute_kv=True)
        await engine.load(Copied(backend, version))
        await engine.resume()
        groups = range(version * GROUPS, (version + 1) * GROUPS)
        played = [await episode(group, index, version) for group in groups for index in range(SIZE)]
        result = train_step(backend, objective, flatten(played, groups), config.learner, version=version)
        assert result.outcome == "applied", result.why
        digests = {(t.id.group, t.id.index): t.digest() for t in played}
        of_groups = group_digests([t.id.group for t in played], tuple(digests.values()))
        gradients += result.record.grad_norms
        most_turns = max(most_turns, *(t.turns for t in played))
        steps.append(Step(tuple(groups), tuple(t.task_id for t in played[::SIZE]), digests, of_groups))
    await engine.close()
    return Synchronous(steps, gradients, most_turns, dict(backend.weights()))


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    sections = SECTIONS | {"launch": SECTIONS["launch"] | {"runs_dir": str(tmp_path)}}
    given = getattr(request, "param", 1)
    changes = given if isinstance(given, dict) else {"actors": {"slots": given}}
    for section, values in changes.items():
        sections[section] = SECTIONS[section] | values
    return Config.model_validate(sections)


@pytest.fixture
def finished(config: Config, tmp_path: Path) -> Iterator[RunFolder]:
    """The same config through `asyncrl launch`, at its end."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", str(path)]
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ,
    )
    folder = RunFolder(tmp_path / "run")
    try:
        out, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 0, out
        yield folder
    finally:
        launcher.kill()
        launcher.communicate(timeout=10)
        if (folder.path / "run.json").is_file():
            kill_all(of_run(folder.id))
            folder.remove_temporary()


def trained(ledger: LedgerRows) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Groups and their tasks, batch by batch."""
    return [(batch.groups, tuple(ledger.groups[g].task_id for g in batch.groups)) for batch in ledger.line]


@pytest.mark.system
@pytest.mark.usefixtures("torch_as_it_was")
def test_staleness_zero_is_a_plain_synchronous_loop_bit_for_bit(config: Config, finished: RunFolder) -> None:
    as_in_the_plain_loop(config, finished)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize(
    "config",
    [{"eval": {"tasks": 2, "every": 1}}, {"eval": {"tasks": 2, "every": 1}, "actors": {"count": 2, "eval": 1}}],
    indirect=True,
    ids=["one actor in turn", "a reserved actor"],
)
def test_with_evaluation_during_the_run_too(config: Config, finished: RunFolder) -> None:
    as_in_the_plain_loop(config, finished)
    evals = read_ledger(finished.buffer).tables["evals"]
    assert [row["due"] for row in evals if row["state"] == "done"][::STEPS] == [0, STEPS]


def as_in_the_plain_loop(config: Config, finished: RunFolder) -> None:
    plain = asyncio.run(synchronous_loop(config))
    assert min(plain.gradients) > 0, "a step without a gradient compares nothing: take another launch.seed"
    assert plain.most_turns > 1, "the engine goes on from what it computed in the turn before"

    ledger = read_ledger(finished.buffer)
    assert trained(ledger) == [(step.groups, step.tasks) for step in plain.steps]
    stored = {key: row.digest for key, row in ledger.trajectories.items()}
    assert stored == {key: digest for step in plain.steps for key, digest in step.trajectories.items()}
    last = complete(finished.checkpoints)[-1]
    state, done = read_list(last)
    assert (state.version, [d.groups for d in done]) == (STEPS, [step.group_digests for step in plain.steps])

    saved = load_file(last / "hf" / "model.safetensors")
    assert saved.keys() == plain.weights.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, plain.weights[name])] == []


@pytest.mark.system
@pytest.mark.parametrize("config", [8], indirect=True)
def test_with_many_slots_the_same_groups_in_the_same_steps_and_no_stale_token(
    config: Config, finished: RunFolder
) -> None:
    source = open_source(config)
    expected = [tuple(range(b * GROUPS, (b + 1) * GROUPS)) for b in range(STEPS)]
    ledger = read_ledger(finished.buffer)
    assert trained(ledger) == [(groups, tuple(str(source.task(g)["id"]) for g in groups)) for groups in expected]
    with closing(PayloadFiles(finished.buffer / "payloads")) as payloads:
        for batch in ledger.line:
            for group in batch.groups:
                members = [decoded(ledger.groups[group], row, payloads.read) for row in ledger.members[group]]
                assert len(members) == SIZE
                sampled = {int(v) for t in members for row in t.rows for v in row.versions[row.mask]}
                assert sampled == {batch.version}
