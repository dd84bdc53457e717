"""A real run whose bound on staleness changes, with its learner killed in between: audit and replay bear it.

The change is certain, whatever the machine's speed: the learning rate allows a smaller bound than the first one.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.audit.checks import violations
from asyncrl.audit.payloads import PayloadFiles
from asyncrl.audit.replay import replay
from asyncrl.audit.witnesses import gather
from asyncrl.launch.diagnosis.waits import why
from asyncrl.tracking.bound_events import changes
from asyncrl.tracking.sinks.jsonl import by_step
from tests.launched import launched
from tests.waiting import until

CONFIG: dict[str, Any] = {
    "model": {"path": "quickstart"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256},
    "actors": {"count": 1, "slots": 16, "max_new_tokens": 48, "threads": 1},
    "buffer": {
        "max_staleness": "auto", "staleness_limit": 3, "staleness_lr": 1.2e-3, "over_age": "mask", "keep": "all",
        "capacity": 64,
    },
    # A cadence of 2: at least 1, and 3 to begin with. At a rate of 1e-3, `staleness_lr` allows 1.
    "weights": {"every": 2},
    "learner": {
        "steps": 10, "groups_per_step": 2, "group_size": 4, "lr": 1e-3, "threads": 1, "checkpoint_every": 3,
        "keep_checkpoints": 9,
    },
    "eval": {"tasks": 0},
    "launch": {"seed": 1, "name": "run", "restarts": 10},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_audit_and_replay_bear_a_bound_that_changes_and_a_killed_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launched(tmp_path, CONFIG) as it:
        assert until(lambda: it.steps >= 5, 300), it.said
        it.kill("learner")
        assert it.launcher.wait(500) == 0, it.said
        run = it.run
    with closing(PayloadFiles(run.buffer / "payloads")) as payloads:
        evidence = gather(run, run.load_config(), payloads)
        assert list(violations(evidence)) == []
    line = evidence.ledger.line
    bounds = [batch.bound for batch in line]
    assert bounds[0] == 3
    assert min(bounds) == 1, "the learning rate allows no more"
    assert all(batch.decision is not None and batch.decision.target == 1 for batch in line)
    assert len(evidence.ledger.tables["incarnations"]) > 1
    assert replay(run) == 0
    assert "every one bit-identical" in capsys.readouterr().out
    (said,) = changes(run.path / "events.jsonl")
    assert said.startswith("1 from step 1 on: the limits are 1 to 3, learning rate times bound at most 0.0012")
    assert f"the bound on staleness is {said}" in why(run)
    assert "bound on staleness (buffer.max_staleness: auto)" in run.report.read_text()
    recorded = {record["step"]: record["staleness/bound"] for record in by_step(run.metrics) if record["step"]}
    assert recorded == {batch.version_after: batch.bound for batch in line}
