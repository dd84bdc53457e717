"""Every role killed dead before and after each stage of a step: the audit holds, the weights are those of a replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.audit.command import audit
from asyncrl.run_folder import RunFolder

HOOK = Path(__file__).parent / "stage_kills"
CLIENT = "asyncrl.buffer.client:BufferClient"
ACTOR = "asyncrl.buffer.client:AsyncBufferClient"
LEARNER = [
    (f"{CLIENT}.batch", 3),  # pull
    (f"{CLIENT}.finished", 2),
    ("asyncrl.weights.local.shm:ShmPublisher.publish", 2),
    (f"{CLIENT}.published", 2),
    ("asyncrl.learner.checkpoints.checkpoints:Checkpoints.begin", 1),
    (f"{CLIENT}.checkpointed", 1),
]
ACTORS = [(f"{ACTOR}.tickets", 3), (f"{ACTOR}.put", 5), ("asyncrl.actors.weight_updates:WeightUpdates.look", 3)]
ACTORS += [("asyncrl.actors.engines.hf.engine:HFEngine.load", 2), ("asyncrl.actors.ack_log:AckLog.write", 5)]
BUFFER = [(f"asyncrl.buffer.core:Buffer.{op}", nth) for op, nth in (("put", 9), ("batch", 3), ("finished", 2))]
BUFFER += [("asyncrl.buffer.core:Buffer.published", 2), ("asyncrl.buffer.core:Buffer.checkpointed", 1)]
BUFFER += [("asyncrl.buffer.ledger.storage.database:Database.commit", 30)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("roles", "stages", "steps"),
    [(["learner"], LEARNER, 100), (["buffer"], BUFFER, 200), (["actor-0", "actor-1"], ACTORS, 400)],
    ids=["learner", "buffer", "actors"],
)
def test_killed_before_and_after_every_stage(
    tmp_path: Path, roles: list[str], stages: list[tuple[str, int]], steps: int
) -> None:
    run, done = RunFolder(tmp_path / "run"), tmp_path / "done"
    done.mkdir()
    kills = [f"{role} {place} {when} {nth}" for role in roles for place, nth in stages for when in ("before", "after")]
    flags = {
        "config": Path(__file__).parents[1] / "configs" / "quickstart.yaml",
        "launch.runs-dir": tmp_path, "launch.name": "run", "launch.restarts": len(kills) + 1,
        "learner.steps": steps, "learner.groups-per-step": 4, "learner.group-size": 4, "learner.checkpoint-every": 4,
        "learner.batch-retries": len(kills) + 1, "buffer.capacity": 64, "buffer.keep": "all", "buffer.lease-s": 5,
        "actors.count": 2, "actors.slots": 16, "eval.tasks": 0,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    hook = {"PYTHONPATH": str(HOOK), "STAGE_KILLS": ",".join(kills), "STAGE_KILLS_DONE": str(done)}
    launched = subprocess.run(
        [sys.executable, "-m", "asyncrl", "launch", *words], env=os.environ | hook, timeout=1200, check=False
    )
    assert launched.returncode == 0
    assert len(list(done.iterdir())) == len(kills), "not every stage was reached"
    assert json.loads(run.summary.read_text())["restarts"] == dict.fromkeys(roles, len(kills) // len(roles))
    assert audit(run, format="json", out=run.path / "audit.json") == 0
    replayed = subprocess.run(
        [sys.executable, "-m", "asyncrl", "replay", str(run.path)], timeout=1200, check=False, capture_output=True
    )
    assert replayed.returncode == 0, replayed.stdout.decode()[-2000:]
