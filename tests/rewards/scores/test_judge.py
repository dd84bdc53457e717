"""The judge, against an HTTP server that answers as told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards import build, run_score
from asyncrl.rewards.http import ServiceFailed
from asyncrl.rewards.scores.judge import Judge, JudgeFailed

TASK = {"id": "t", "prompt": "Name a colour.", "ground_truth": "red"}


class FakeEndpoint:
    """Gives its answers in turn: (status, headers, body)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                fake.keys.append(self.headers.get("Authorization"))
                status, headers, body = fake.answers.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def says(self, *texts: str | None) -> None:
        bodies = [{"choices": [{"message": {"content": text}}]} for text in texts]
        self.answers = [(200, {}, json.dumps(body).encode()) for body in bodies]


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join(10)


def judged(endpoint: FakeEndpoint, solution: str = "blue", **options: Any) -> float:
    judge = Judge(endpoint.url, "m", **{"retries": 1, "timeout_s": 10.0, **options})
    return asyncio.run(run_score(judge, TASK, solution)).value


def test_its_last_score_counts_and_is_kept(
    endpoint: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    endpoint.says("Score: 9? No. It is a colour.\n**Score:** 7")
    options = {"cache_path": str(tmp_path), "api_key_env": "JUDGE_KEY", "extra_body": {"seed": 1}}
    assert judged(endpoint, **options) == pytest.approx(0.7)
    (asked,) = endpoint.asked
    assert (asked["model"], asked["temperature"], asked["seed"]) == ("m", 0.0, 1)
    assert all(text in asked["messages"][0]["content"] for text in ("Name a colour.", "blue", "red"))
    assert endpoint.keys == ["Bearer k"]
    assert judged(endpoint, **options) == pytest.approx(0.7), "nobody is asked a second time"
    endpoint.says("Score: 1")
    assert judged(endpoint, "green {braces}", **options) == pytest.approx(0.1)


def test_nonsense_is_asked_again_and_then_an_outage_never_a_reward(endpoint: FakeEndpoint) -> None:
    endpoint.says("Splendid!", "Score: 5")
    assert judged(endpoint) == 0.5
    for nonsense in (("Splendid!", "Score: ten"), ("Score: 11", "Score: -1"), (None, "")):
        endpoint.says(*nonsense)
        with pytest.raises(JudgeFailed, match=r"gave no score from 0\.0 to 10\.0 in 2 answers; the last: "):
            judged(endpoint)


def test_a_busy_service_is_waited_for_and_a_refusal_is_not(endpoint: FakeEndpoint) -> None:
    good = json.dumps({"choices": [{"message": {"content": "Score: 10"}}]}).encode()
    endpoint.answers = [(429, {"Retry-After": "0.01"}, b""), (200, {}, good)]
    assert judged(endpoint) == 1.0
    endpoint.answers = [(200, {}, b"<html>"), (503, {}, b"")]
    with pytest.raises(ServiceFailed, match=r"gave no answer in 2 attempts: 503"):
        judged(endpoint)
    endpoint.answers = [(401, {}, b"no such key")]
    with pytest.raises(ServiceFailed, match=r"refused: 401 .*no such key"):
        judged(endpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{answer}"}, r"judge\.prompt: KeyError\('answer'\)"),
        ({"pattern": "[0-9]+"}, r"judge\.pattern .* expected a group"),
        ({"api_key_env": "NOT_THERE"}, "NOT_THERE.*not set"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge("http://127.0.0.1:9", "m", **options)


def test_it_is_a_score_by_name_with_limits_around_it(endpoint: FakeEndpoint) -> None:
    endpoint.says("Score: 2")
    spec = {
        "name": "judge",
        "options": {"base_url": endpoint.url, "model": "m"},
        "wrap": [{"name": "rate_limited", "requests_per_minute": 600, "concurrency": 4}],
    }
    assert asyncio.run(run_score(build(spec, "score"), TASK, "blue")).value == 0.2
