"""The teacher's servers, asked over HTTP: a fake one that speaks both dialects, and everything that it may do wrong."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import AsyncRLError, ConfigError, RunError
from asyncrl.scorer.dialects import DIALECTS, TeacherUnusable, Token, scores_of
from asyncrl.scorer.identity import Probe, of_run
from asyncrl.scorer.requests import MOST_BYTES, TeacherSilent
from asyncrl.scorer.servers import TeacherServers, remembered
from asyncrl.trajectory import TicketId
from asyncrl.wire.teacher_scores import unlikely
from tests.buffer.fakes import trajectory
from tests.scorer.fake_teacher import DRIP_S, Fake, serving
from tests.waiting import until

PROBE = (3, 1, 4, 1, 5, 9, 2, 6)


@contextlib.contextmanager
def asked(urls: list[str], file: Path, dialect: str = "vllm", k: int = 3, **given: Any) -> Iterator[TeacherServers]:
    options: dict[str, Any] = {"server_s": 60.0, "longest": 100} | given
    servers = TeacherServers(
        urls, DIALECTS[dialect](), k=k, probe=PROBE, remember=remembered(file, "teacher"), **options
    )
    try:
        yield servers
    finally:
        servers.close()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_scores_are_those_of_the_model(tmp_path: Path, dialect: str, k: int) -> None:
    fake, t = Fake(), trajectory(TicketId(0, 0, 0), (0, 0, 0, 0))
    with serving(fake) as url, asked([url], tmp_path / "teacher.json", dialect, k) as servers:
        servers.look(0.0)
        assert servers.silence == ""
        (scores,) = servers.score([t])
    tokens = t.rows[0].token_ids.tolist()
    table = fake.table()
    assert np.allclose(scores.sampled, [table[tokens[i - 1], tokens[i]] for i in (2, 3, 4, 5)], atol=1e-6)
    assert scores.ids.shape == scores.logprobs.shape == (4, k)
    for row, place in enumerate((2, 3, 4, 5)):
        expected = np.sort(table[tokens[place - 1]])[::-1][:k]
        assert np.allclose(scores.logprobs[row], expected, atol=1e-6)
        assert np.allclose(table[tokens[place - 1]][scores.ids[row]], expected, atol=1e-6)
    assert unlikely([scores]) == ""


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("truncate", r"gave 2 words for token 1 of a row, learner\.teacher\.k asks for 3.*lower learner\.teacher\.k"),
        ("renormalise", r"another logprob when it is asked for 1 word than for 3.*renormalises"),
        ("infinite", r"gave the logprob -9999\.0 at token 1 of a row.*weights are damaged"),
        ("form", r"answered in another form than expected .*learner\.teacher\.dialect"),
        ("400", r"refused a row of 8 tokens: 400 .*--max-logprobs 3, or lower learner\.teacher\.k"),
    ],
)
def test_a_server_that_cannot_be_learned_from_is_refused_with_the_remedy(tmp_path: Path, fault: str, why: str) -> None:
    with serving(Fake(fault=fault)) as url, asked([url], tmp_path / "teacher.json") as servers:
        with pytest.raises(TeacherUnusable, match=f"(?s){url}.*{why}"):
            servers.look(0.0)
        with pytest.raises(TeacherSilent):
            servers.score([trajectory(TicketId(0, 0, 0))])


def test_a_token_that_the_server_does_not_name_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(TeacherUnusable, match=r"gave no logprob of token \d of a row itself")
    with serving(Fake(fault="nameless")) as url, asked([url], tmp_path / "teacher.json", k=1) as servers, refused:
        servers.look(0.0)


def test_rows_beyond_the_context(tmp_path: Path) -> None:
    too_long = pytest.raises(ConfigError, match=r"env\.max_tokens is 100, and the teacher .* at most 99 tokens")
    with serving(Fake(context=100)) as url, asked([url], tmp_path / "teacher.json") as servers, too_long:
        servers.look(0.0)
    with serving(Fake(context=8)) as url, asked([url], tmp_path / "teacher.json", longest=7) as servers:
        servers.look(0.0)
        with pytest.raises(TeacherUnusable, match=r"a row has 10 tokens, and the teacher at .* reads at most 7: lower"):
            servers.score([trajectory(TicketId(0, 0, 0), (0,) * 8)])


def test_another_teacher_is_noticed_at_the_start_and_after_a_group(tmp_path: Path) -> None:
    fake, file = Fake(), tmp_path / "teacher.json"
    with serving(fake) as url:
        with asked([url], file) as servers:
            servers.look(0.0)
            identity = servers.identity
            fake.seed = 2
            with pytest.raises(TeacherUnusable, match="serves another teacher than the one that this run learns from"):
                servers.score([trajectory(TicketId(0, 0, 0))])
        with asked([url], file) as servers, pytest.raises(TeacherUnusable, match="Serve the first one again"):
            servers.look(0.0)
        fake.seed = 1
        with asked([url], file) as servers:
            servers.look(0.0)
            assert servers.identity == identity, "the first start of the run decides"


def test_every_server_that_gave_a_row_is_probed_behind_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, other, t = Fake(), Fake(), trajectory(TicketId(0, 0, 0))
    with serving(fake) as one, serving(other) as two, asked([one, two], tmp_path / "t.json") as servers:
        servers.look(0.0)
        in_turn = itertools.cycle(servers._servers)
        monkeypatch.setattr(servers, "_least_busy", lambda _: next(in_turn))
        other.seed = 2
        with pytest.raises(TeacherUnusable, match=f"{two}.* serves another teacher"):
            servers.score([t, t])


def test_a_silent_server_is_asked_again_and_the_others_meanwhile(tmp_path: Path) -> None:
    fake, other, t = Fake(), Fake(), trajectory(TicketId(0, 0, 0))
    with serving(fake) as one, serving(other) as two, asked([one, two], tmp_path / "t.json") as servers:
        servers.look(0.0)
        fake.fault = "500"
        assert len(servers.score([t])[0]) == 3
        assert servers.silence == ""
        assert servers.failures == 1
        fake.fault = other.fault = "500"
        with pytest.raises(TeacherSilent, match="answered 500"):
            servers.score([t])
        assert "answered 500" in servers.silence
        fake.fault = other.fault = ""
        servers.look(time.monotonic() + 5.0)
        assert len(servers.score([t])[0]) == 3


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is asked for again at once."""
    monkeypatch.setattr("asyncrl.scorer.servers.AGAIN_S", (0.0,) * 4)


@pytest.mark.usefixtures("hasty")
def test_a_row_at_which_a_server_errs_each_time_ends_the_run(tmp_path: Path) -> None:
    """It answers its probe, before and behind each time: it is the row, which would be asked for without end."""
    fake, row = Fake(fault="500", spares=len(PROBE)), trajectory(TicketId(0, 0, 0), (0,) * 8)
    with serving(fake) as url, asked([url], tmp_path / "t.json") as servers:
        servers.look(0.0)
        ends = pytest.raises(TeacherUnusable, match=r"erred at a row of 10 tokens, .* 5 times.* answered 500: ")
        with ends as said:
            servers.score([row])
        assert url in str(said.value)
        assert servers.failures == 5
        assert servers.silence == "", "other rows are scored meanwhile"


@pytest.mark.usefixtures("hasty")
def test_a_row_at_which_one_server_errs_is_given_by_another(tmp_path: Path) -> None:
    fake, other, row = Fake(fault="500", spares=len(PROBE)), Fake(), trajectory(TicketId(0, 0, 0), (0,) * 8)
    with serving(fake) as one, serving(other) as two, asked([one, two], tmp_path / "t.json") as servers:
        servers.look(0.0)
        assert len(servers.score([row])[0]) == 8
        assert servers.failures == 1


@pytest.mark.usefixtures("hasty")
def test_outages_do_not_count_as_the_rows_fault(tmp_path: Path) -> None:
    fake, row = Fake(fault="503", spares=len(PROBE)), trajectory(TicketId(0, 0, 0), (0,) * 8)
    with serving(fake) as url, asked([url], tmp_path / "t.json") as servers:
        for turn in range(8):
            servers.look(time.monotonic() + 10.0 * turn)
            with pytest.raises(TeacherSilent, match="answered 503"):
                servers.score([row])
        fake.fault = ""
        servers.look(time.monotonic() + 100.0)
        assert len(servers.score([row])[0]) == 8


def test_a_server_that_hangs_is_named_with_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, row = Fake(fault="hang", spares=len(PROBE)), trajectory(TicketId(0, 0, 0), (0,) * 8)
    with serving(fake) as url, asked([url], tmp_path / "t.json") as servers, ThreadPoolExecutor() as threads:
        servers.look(0.0)
        future = threads.submit(servers.score, [row])
        assert until(lambda: fake.hanging == 1)
        now = time.monotonic()
        said = servers._requests.unanswered(now + 1000.0)
        assert re.match(f"{url}/v1/completions has not answered what it was asked more than 10[0-9]0 s ago", said)
        assert servers._requests.unanswered(now + 1000.0, url[:-1]) == "", "another port"
        servers.look(now + 1000.0)
        assert servers.silence == "", "it names its model: it has much to do"
        monkeypatch.setattr("asyncrl.scorer.requests.ABOUT_SHARE", 0.01)
        fake.fault = "dead"
        servers.look(now + 2000.0)
        assert re.search(r"more than 20\d0 s ago.*not name its model either: its answer was not whole", servers.silence)
        fake.fault = ""
        fake.released.set()
        assert len(future.result(timeout=60)[0]) == 8
        assert servers._requests.unanswered(now + 3000.0) == ""


def test_a_server_that_hangs_at_the_start_is_named_with_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.scorer.requests.SLOW_S", 0.01)
    fake = Fake(fault="hang")
    with serving(fake) as url, asked([url], tmp_path / "t.json") as servers, ThreadPoolExecutor() as threads:
        future = threads.submit(servers.look, 0.0)
        assert until(lambda: fake.hanging == 1 and "has not answered" in servers.silence)
        fake.fault = ""
        fake.released.set()
        future.result(timeout=60)
        assert servers.silence == ""


def test_a_server_that_is_not_there_is_silent(tmp_path: Path) -> None:
    with asked(["http://127.0.0.1:1"], tmp_path / "teacher.json") as servers:
        servers.look(0.0)
        assert "Connect" in servers.silence
        assert servers.identity is None


def test_the_first_of_two_scorers_names_the_teacher(tmp_path: Path) -> None:
    file = tmp_path / "teacher.json"
    first, second = Probe((1, 2), (-1.0,)), Probe((1, 2), (-1.01,))
    assert of_run(file, "t", first) == of_run(file, "t", second)
    with pytest.raises(RunError, match="of another tokenizer than model"):
        of_run(file, "t", replace(second, tokens=(1, 3)))
    file.write_text("{")
    with pytest.raises(AsyncRLError, match="is damaged"):
        of_run(file, "t", first)
    assert list(tmp_path.iterdir()) == [file]


def test_a_server_that_gave_rows_and_then_no_probe_gives_its_group_back(tmp_path: Path) -> None:
    """It may have been started again with another model before the rows."""
    fake = Fake()
    with serving(fake) as url, asked([url], tmp_path / "t.json") as servers:
        servers.look(0.0)
        fake.until = len(fake.asked) + 1
        with pytest.raises(TeacherSilent, match="answered 500"):
            servers.score([trajectory(TicketId(0, 0, 0))])
        assert "answered 500" in servers.silence


@pytest.mark.parametrize("reply", [[], {"data": 3}, {"data": ["m"]}, "models"])
def test_what_is_no_list_of_models_is_named(tmp_path: Path, reply: Any) -> None:
    no_list = pytest.raises(TeacherUnusable, match=r"v1/models answered .*learner\.teacher\.servers")
    with serving(Fake(about=reply)) as url, asked([url], tmp_path / "t.json") as servers, no_list:
        servers.look(0.0)


def test_a_url_where_no_teacher_is_ends_the_run(tmp_path: Path) -> None:
    wrong = pytest.raises(TeacherUnusable, match=r"answered 404.*learner\.teacher\.servers")
    with serving(Fake(fault="404")) as url, asked([url], tmp_path / "t.json") as servers, wrong:
        servers.look(0.0)


def test_an_answer_that_trickles_or_is_too_long_has_an_end(tmp_path: Path) -> None:
    with serving(Fake(fault="trickle")) as url, asked([url], tmp_path / "t.json", server_s=0.3) as servers:
        servers.look(0.0)
        assert "not whole after 0.075 s" in servers.silence
    long = pytest.raises(TeacherUnusable, match="answered with more than")
    with (
        serving(Fake(about={"data": "x" * (MOST_BYTES + 1)})) as url,
        asked([url], tmp_path / "t.json") as servers,
        long,
    ):
        servers.look(0.0)


def test_a_head_that_drips_has_the_deadline_of_the_whole_answer(tmp_path: Path) -> None:
    """No read of it waits for long, so a deadline of each would never end."""
    fake, row = Fake(), trajectory(TicketId(0, 0, 0))
    with serving(fake) as url, asked([url], tmp_path / "t.json", server_s=0.4) as servers:
        servers.look(0.0)
        assert servers.silence == ""
        fake.fault, began = "drip", time.monotonic()
        with pytest.raises(TeacherSilent, match=r"not whole after 0\.4 s"):
            servers.score([row])
        assert time.monotonic() - began < DRIP_S / 2
        servers.look(time.monotonic() + 5.0)
        assert "not whole after 0.1 s" in servers.silence
        assert servers._requests.unanswered(time.monotonic() + 100.0) == "", "nothing is open any more"


def test_a_request_in_work_ends_with_the_scorer(tmp_path: Path) -> None:
    fake, row = Fake(fault="hang", spares=len(PROBE)), trajectory(TicketId(0, 0, 0), (0,) * 8)
    with ThreadPoolExecutor() as threads, serving(fake) as url:
        with asked([url], tmp_path / "t.json") as servers:
            servers.look(0.0)
            future = threads.submit(servers.score, [row])
            assert until(lambda: fake.hanging == 1)
        with pytest.raises(TeacherSilent, match="the scorer ends"):
            future.result(timeout=10)
        fake.released.set()


def test_a_word_that_no_vocabulary_has_is_refused() -> None:
    with pytest.raises(TeacherUnusable, match=r"named the words \[2147483648\]"):
        scores_of([Token(-1.0, [(-1.0, 1 << 31)])], [1], 1, "http://t", "")
