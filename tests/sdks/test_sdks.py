"""Each example of docs/how-to/sdks.md, with the real SDK and the real processes: `make test-sdks`.

Connections break and agents are cancelled on the way. Then every trained trajectory holds exactly the replies that its
agent received, and the start model gives their tokens the recorded logprobs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from asyncrl.audit.payloads import PayloadFiles, decoded
from asyncrl.audit.reading import read_ledger
from asyncrl.config import ModelConfig
from asyncrl.launch.processes import kill_all, of_run
from asyncrl.model import load_model
from asyncrl.quickstart.tokenizer import build_tokenizer
from asyncrl.rendering.template import TemplateRenderer
from asyncrl.run_folder import RunFolder
from asyncrl.trajectory import Row, Trajectory
from tests.sdks.received import Said, said_in, said_of, stops_of

ROOT = Path(__file__).parents[2]
TYPESCRIPT = Path(os.environ.get("ASYNCRL_TYPESCRIPT", ROOT / "examples/typescript"))
"""A copy of examples/typescript with its packages."""
POSITIONS = 2048
"""The quickstart's model in a longer context: smolagents writes long requests."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("agents") is None, reason="the agents' SDKs are not installed: make test-sdks"),
]
RESET, CANCELLED = ["calm", "reset"], ["calm", "reset", "stall"]
no_node = pytest.mark.skipif(
    shutil.which("node") is None or not (TYPESCRIPT / "node_modules" / "openai").is_dir(),
    reason="there is no node, or the packages of examples/typescript are not installed: make test-sdks",
)


@pytest.mark.parametrize(
    ("name", "faults", "constraints"),
    [
        ("openai", CANCELLED, "refuse"),
        ("openai_agents", CANCELLED, "refuse"),
        ("pydantic_ai", CANCELLED, "ignore"),
        ("langgraph", CANCELLED, "refuse"),
        ("smolagents", RESET, "ignore"),  # a thread cannot be cancelled
        ("litellm", CANCELLED, "refuse"),
        ("anthropic", CANCELLED, "refuse"),
        pytest.param("typescript", CANCELLED, "refuse", marks=no_node),
    ],
)
def test_what_is_trained_is_what_the_agent_received(
    name: str, faults: list[str], constraints: str, tmp_path: Path
) -> None:
    model, run = longer(tmp_path / "model"), RunFolder(tmp_path / "run")
    trained = train(run, model, name, faults, constraints)
    plays = [json.loads(path.read_text()) for path in (tmp_path / "played").glob("*.json")]
    renderer = TemplateRenderer(build_tokenizer())
    judge = load_model(ModelConfig(path=str(model)))
    faults_met: Counter[str] = Counter()
    scored = 0
    for trajectory in trained:
        play = the_play_of(trajectory, plays, renderer)
        faults_met[play["fault"]] += play["broken"]
        assert trajectory.reward == play["reward"]
        for row in trajectory.rows:
            expected = logprobs(judge, row)
            np.testing.assert_allclose(row.logprobs[row.mask], expected[row.mask], atol=1e-4)
            scored += int(row.mask.sum())
    assert scored > 100
    assert all(faults_met[fault] > 0 for fault in set(faults) - {"calm"}), faults_met


def the_play_of(trajectory: Trajectory, plays: list[Any], renderer: TemplateRenderer) -> Any:
    """The play that made `trajectory`: an attempt may have failed, and its ticket was played again."""
    of_ticket = [p for p in plays if (p["task"], p["index"]) == (trajectory.task_id, trajectory.id.index)]
    for play in of_ticket:
        stops = [stop for _, request, _ in play["received"] for stop in stops_of(request)]
        received = Counter(said for path, _, reply in play["received"] for said in said_in(path, reply))
        if Counter(in_rows(trajectory, renderer, stops)) == received:
            return play
    raise AssertionError(
        f"{trajectory.id} holds {in_rows(trajectory, renderer, [])}, and its agent received "
        f"{[[said_in(path, reply) for path, _, reply in play['received']] for play in of_ticket]}"
    )


def in_rows(trajectory: Trajectory, renderer: TemplateRenderer, stops: list[str]) -> list[Said]:
    """The replies in the rows: runs of sampled tokens."""
    found = []
    for row in trajectory.rows:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], row.mask, [False])).astype(int)))
        for start, end in edges.reshape(-1, 2):
            found.append(said_of(renderer.parse(row.token_ids[start:end].tolist()), stops))
    return found


def logprobs(model: Any, row: Row) -> np.ndarray[Any, Any]:
    """Of every token after those before it, by one plain forward pass; 0 for the first."""
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.tensor([row.token_ids.tolist()])).logits[0].float(), -1)
    ids = torch.tensor(row.token_ids.tolist())
    return np.concatenate(([0.0], logits[torch.arange(len(ids) - 1), ids[1:]].numpy()))


def longer(folder: Path) -> Path:
    """The quickstart's model, in a context of `POSITIONS`."""
    shutil.copytree(ROOT / "asyncrl/quickstart/checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return folder


def train(run: RunFolder, model: Path, name: str, faults: list[str], constraints: str) -> list[Trajectory]:
    """Train two steps with learning rate 0, so that every version is the start model; the trained trajectories."""
    folder = run.path.parent
    (folder / "played").mkdir()
    options = {"folder": str(TYPESCRIPT)} if name == "typescript" else {}
    config = {
        "model": {"path": str(model)},
        "env": {
            "name": "tests/sdks/watched.py:agent",
            "options": {
                "example": f"examples/agent_{name}.py:agent", "folder": str(folder / "played"), "faults": faults,
                "options": options,
            },
            "max_turns": 16,
            "max_tokens": POSITIONS,
        },
        "actors": {"slots": 6, "max_new_tokens": 48, "constraints": constraints},
        "buffer": {"keep": "all", "capacity": 64},
        "learner": {"steps": 2, "groups_per_step": 4, "group_size": 4, "lr": 0.0},
        "eval": {"tasks": 0},
        "launch": {"runs_dir": str(folder), "name": "run"},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]  # the SDKs, and this package of tests
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "launch", "--config", str(folder / "config.yaml")],
            cwd=ROOT, capture_output=True, text=True, timeout=380, check=False, env=environment,
        )  # fmt: skip
    finally:
        if (run.path / "run.json").is_file():
            kill_all(of_run(run.id))
    logs = "".join(log.read_text()[-4000:] for log in run.logs.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs
    summary = json.loads(run.summary.read_text())
    assert (summary["outcome"], summary["restarts"]) == ("finished", {}), logs
    assert "env_error" not in logs, logs
    return stored(run)


def stored(run: RunFolder) -> list[Trajectory]:
    """The trained trajectories, decoded from their payloads."""
    ledger = read_ledger(run.path / "buffer")
    files = PayloadFiles(run.path / "buffer" / "payloads")
    try:
        numbers = [number for batch in ledger.line if batch.outcome == "applied" for number in batch.groups]
        rows = [(ledger.groups[number], row) for number in numbers for row in ledger.members[number]]
        assert rows
        return [decoded(group, row, files.read) for group, row in rows]
    finally:
        files.close()
