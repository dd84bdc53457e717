"""The scorer's loop with a buffer in this process and a fake server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client.blocking import scores_too_large
from asyncrl.buffer.in_process import InProcessBuffer
from asyncrl.config import Config
from asyncrl.scorer.dialects import VLLM, TeacherUnusable
from asyncrl.scorer.loop import Scorer
from asyncrl.scorer.score_log import ScoreLog
from asyncrl.scorer.servers import TeacherServers, remembered
from tests.buffer.fakes import FakeSource, play, rules
from tests.buffer.scoring.fakes import SCORED
from tests.scorer.fake_teacher import Fake, serving
from tests.wire.test_teacher_scores import some

DEADLINE_S = 120.0


class FakeReporter:
    def __init__(self) -> None:
        self.waits: list[tuple[str | None, str]] = []

    def waiting(self, cause: str | None, on: str = "") -> None:
        if (cause, on) not in self.waits[-1:]:
            self.waits.append((cause, on))

    def metrics(self, values: Any) -> None:
        self.values = values


class Run:
    """One scorer against a buffer that has `groups` complete groups; turns are made one by one."""

    def __init__(self, folder: Path, url: str, groups: int = 3, slots: int = 2, server_s: float = 60.0) -> None:
        self.buffer = InProcessBuffer(rules(**SCORED), FakeSource(), folder=folder / "buffer")
        started = self.buffer.start(0, 0, None)
        self.buffer.published(started.incarnation, 0, 0, "digest-0")
        play(self.buffer.core, 2 * groups)
        self.buffer.identity = "scorer-0"
        self.servers = TeacherServers(
            [url],
            VLLM(),
            k=2,
            server_s=server_s,
            longest=20,
            probe=(1, 2),
            remember=remembered(folder / "t.json", "t"),
        )
        given = {"path": "t", "scored_by": "servers", "servers": [url], "over": "top_k", "k": 2, "score_slots": slots}
        config = Config.model_validate({"learner": {"teacher": given}})
        self.reporter = FakeReporter()
        acks = ScoreLog(folder / "scores" / "scorer-0.jsonl")
        self.scorer = Scorer(
            "scorer-0", config, buffer=self.buffer, servers=self.servers, score_log=acks,
            reporter=self.reporter,  # type: ignore[arg-type]
        )  # fmt: skip

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, self.buffer.status()
            self.scorer._look_at_servers()
            self.scorer._put_what_is_done()
            self.scorer._take_groups()
            time.sleep(0.01)

    def close(self) -> None:
        self.servers.close()
        self.buffer.close()


@pytest.fixture
def opened() -> Any:
    runs: list[Run] = []
    yield lambda *given, **more: runs.append(Run(*given, **more)) or runs[-1]
    for run in runs:
        run.close()


def test_every_complete_group_is_scored(tmp_path: Path, opened: Any) -> None:
    with serving(Fake()) as url:
        run: Run = opened(tmp_path, url)
        run.until(lambda: run.buffer.status()["unscored"] == 0)
        run.until(lambda: run.reporter.waits[-1][0] == "groups")
    assert run.scorer.groups == 3
    assert len((tmp_path / "scores" / "scorer-0.jsonl").read_text().splitlines()) == 6
    assert run.buffer.batch(1, 0, 0, 1, 0.0).scores[0].scorer == "scorer-0"


def test_groups_go_back_while_no_server_answers_and_are_scored_when_one_does(tmp_path: Path, opened: Any) -> None:
    fake = Fake()
    with serving(fake) as url:
        run: Run = opened(tmp_path, url)
        run.until(lambda: run.servers.silence == "")
        fake.fault = "500"
        run.until(lambda: "answered 500" in run.buffer.status()["teacher_silent"])
        run.until(lambda: run.buffer.status()["scoring"] == {})
        assert run.reporter.waits[-1][0] == "teacher"
        fake.fault = ""
        run.until(lambda: run.buffer.status()["unscored"] == 0)
    ended = [how for (how,) in run.buffer.core.database.read("SELECT DISTINCT ended FROM scorings ORDER BY 1")]
    assert set(ended) <= {"returned", "scored"}
    assert run.scorer.groups == 3


def test_another_teacher_ends_the_scorer_and_nothing_of_it_is_stored(tmp_path: Path, opened: Any) -> None:
    fake = Fake()
    with serving(fake) as url:
        run: Run = opened(tmp_path, url)
        run.until(lambda: run.servers.silence == "")
        stored = run.scorer.groups
        fake.seed = 9
        with pytest.raises(TeacherUnusable, match="another teacher"):
            run.until(lambda: run.scorer.groups > stored + 3)


def test_a_hung_server_is_named_and_soon_silent(tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its row's deadline. While it names its model it is slow; if it does not, `wait_s` stands still."""
    monkeypatch.setattr("asyncrl.scorer.requests.SLOW_S", 0.01)
    fake = Fake(fault="hang", spares=2)
    with serving(fake) as url:
        run: Run = opened(tmp_path, url, server_s=86400.0)
        run.until(lambda: fake.hanging == 2)
        slow = f"{url}/v1/completions has not answered what it was asked more than"
        run.until(lambda: run.reporter.waits[-1][0] == "teacher" and slow in run.reporter.waits[-1][1])
        assert run.servers.silence == ""
        monkeypatch.setattr("asyncrl.scorer.requests.ABOUT_SHARE", 1e-5)
        fake.fault = "dead"
        run.until(lambda: "does not name its model either" in run.buffer.status()["teacher_silent"])
        assert len(run.scorer._work) == 2
        fake.fault = ""
        fake.released.set()
        run.until(lambda: run.buffer.status()["unscored"] == 0)


def test_a_row_that_no_server_manages_ends_the_scorer(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.scorer.servers.AGAIN_S", (0.0,) * 4)
    with serving(Fake(fault="500", spares=2)) as url:
        run: Run = opened(tmp_path, url)
        with pytest.raises(TeacherUnusable, match=f"{url} erred at a row of 3 tokens"):
            run.until(lambda: False)


def test_a_scorer_that_is_told_to_stop_gives_its_groups_back(tmp_path: Path, opened: Any) -> None:
    with serving(Fake(fault="delay")) as url:
        run: Run = opened(tmp_path, url)
        run.until(lambda: bool(run.buffer.status()["scoring"]))
        run.scorer.stop()
        run.scorer.run()
    assert run.buffer.status()["scoring"] == {}


HUNG = """
import sys
from pathlib import Path
from tests.scorer.fake_teacher import Fake, serving
from tests.scorer.test_loop import Run

fake = Fake(fault="hang", spares=2)
with serving(fake) as url:
    run = Run(Path(sys.argv[1]), url, server_s=86400.0)
    run.until(lambda: fake.hanging == 2)
    run.scorer.stop()
    run.scorer.run()
    run.servers.close()
    print(run.buffer.status()["scoring"])
"""


@pytest.mark.system
def test_a_hung_server_keeps_no_scorer_alive(tmp_path: Path) -> None:
    """It has accepted the connections, and never answers. The groups are given back, and the process ends."""
    ended = subprocess.run(
        [sys.executable, "-c", HUNG, str(tmp_path)], timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("{}\n", 0), ended.stderr


def test_scores_beyond_what_the_buffer_takes_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scores_too_large(some()) == ""
    monkeypatch.setattr("asyncrl.buffer.client.blocking.MAX_RECORD_BYTES", 1000)
    assert "lower learner.teacher.k, learner.group_size or env.max_tokens" in scores_too_large(some())
