"""A real run under `launch.tuning: auto`: the actors take the slots in force, also one that is added later and one that
was killed, and audit and replay bear it.

That the slots are raised is certain, whatever the machine's speed: tools of a second keep the learner waiting.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.replay import replay
from asyncrl.audit.witnesses import gather
from asyncrl.buffer.bounds.slots import FIRST
from asyncrl.launch.diagnosis.waits import why
from asyncrl.tracking.bound_events import changes
from tests.launched import launched
from tests.waiting import until

CONFIG: dict[str, Any] = {
    "model": {"path": "quickstart"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256, "options": {"tool_latency_s": 1.0}},
    "actors": {"count": 1, "max_slots": 48, "max_new_tokens": 48, "threads": 1},
    "buffer": {"staleness_limit": 3, "keep": "all", "capacity": 256},
    "learner": {
        "steps": 12, "groups_per_step": 4, "group_size": 4, "lr": 1e-3, "threads": 1, "checkpoint_every": 4,
        "keep_checkpoints": 9,
    },
    "eval": {"tasks": 0},
    "launch": {"seed": 1, "name": "run", "restarts": 10, "tuning": "auto"},
}  # fmt: skip


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_actors_take_the_slots_in_force_and_audit_and_replay_bear_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launched(tmp_path, CONFIG) as it:
        run = it.run
        assert until(lambda: it.steps >= 4, 300), it.said
        subprocess.run([sys.executable, "-m", "asyncrl", "actors", "add", "1", "--run", str(run.path)], check=True)
        it.kill("actor-0")
        assert until(lambda: it.steps >= 7, 300), it.said
        it.kill("learner")
        assert it.launcher.wait(500) == 0, it.said
    with closing(PayloadFiles(run.buffer / "payloads")) as payloads:
        evidence = gather(run, run.load_config(), payloads)
        assert list(violations(evidence)) == []
    line = evidence.ledger.line
    decided = [batch.tuned.slots for batch in line if batch.tuned is not None]
    assert len(decided) == len(line) == 12
    assert max(decided) > FIRST, "the learner waits for the tools"
    held = _most_held(evidence.ledger.tables["attempts"])
    assert FIRST < held["actor-0"] <= max(decided)
    assert set(held) == {"actor-0", "actor-1"}
    assert replay(run) == 0
    assert "every one bit-identical" in capsys.readouterr().out
    said = changes(run.path / "events.jsonl", "slots")
    assert len(said) == sum(bool(batch.tuned and batch.tuned.why) for batch in line)
    assert "the learner waits" in said[0]
    assert f"the number of slots of each actor is {said[-1]}" in why(run)
    assert "slots of each actor (launch.tuning: auto)" in run.report.read_text()


def _most_held(attempts: list[dict[str, Any]]) -> dict[str, int]:
    """By actor, the most tickets that it held at once, by the ledger's times."""
    held: dict[str, int] = {}
    for name in {a["actor"] for a in attempts}:
        own = [a for a in attempts if a["actor"] == name]
        at = [(a["issued_at"], 1) for a in own] + [(a["ended_at"], -1) for a in own if a["ended_at"] is not None]
        now = most = 0
        for _, more in sorted(at):
            now += more
            most = max(most, now)
        held[name] = most
    return held
