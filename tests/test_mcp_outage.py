"""An MCP server dies during a run and does not come up at once: its episodes are `env_error`, and the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.launch.processes import kill_all, of_run
from asyncrl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
SERVER = """
import os, sys
from pathlib import Path

calls = 0

def lookup(key: str) -> str:
    '''Look up a key in the store.'''
    global calls
    calls += 1
    if nth == 1 and calls == 20:
        os._exit(1)
    return "17"

def task(rng):
    first, second = rng.sample(("ant", "bat", "bee", "cat", "cow", "crab", "deer", "dog", "duck", "eel"), 2)
    return {"prompt": f"What is {first} + {second}?", "ground_truth": "34"}

if __name__ == "__main__":
    starts = Path(sys.argv[1])
    with starts.open("a") as file:
        file.write("started\\n")
    nth = len(starts.read_text().splitlines())
    if 2 <= nth <= 5:
        sys.exit(1)
    from mcp.server import MCPServer

    server = MCPServer("store")
    server.tool()(lookup)
    server.run("stdio")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_dies_costs_episodes_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    starts = tmp_path / "starts"
    options = {"servers": [{"command": ["{python}", str(tmp_path / "server.py"), str(starts)]}], "score": "exact_match"}
    config = f"""
model: {{path: quickstart}}
data: {{source: generated, options: {{function: "{tmp_path}/server.py:task", held_out_size: 50}}}}
env: {{name: mcp, options: {json.dumps(options)}, max_turns: 4, retries: 1}}
actors: {{slots: 16, max_new_tokens: 48}}
buffer: {{capacity: 64}}
learner: {{steps: 12, groups_per_step: 4, group_size: 4, checkpoint_every: 12}}
eval: {{tasks: 4}}
"""
    (tmp_path / "config.yaml").write_text(config)
    run = RunFolder(tmp_path / "run")
    words = ["--config", str(tmp_path / "config.yaml"), "--launch.runs-dir", str(tmp_path), "--launch.name", "run"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "launch", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    finally:
        if (run.path / "run.json").is_file():
            kill_all(of_run(run.id))
    logs = "".join(log.read_text() for log in run.logs.glob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs[-6000:]

    summary = json.loads(run.summary.read_text())
    assert (summary["outcome"], summary["steps"], summary["restarts"]) == ("finished", 12, {})
    assert len(starts.read_text().splitlines()) >= 6, "the server came back"
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    failed = [record["buffer/env_failures"] for record in records if "buffer/env_failures" in record]
    assert max(failed) > 0
    assert max(record.get("buffer/dropped/env_error", 0) for record in records) > 0, "past env.retries"
    assert "MCP server" in logs, "and it is said which"
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(run.path)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "env_error" in audit.stdout
