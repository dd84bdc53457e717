"""`asyncrl eval --endpoint`: a served model plays the held-out tasks, with their tools, without its tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import asyncrl.quickstart
from asyncrl.cli import main
from asyncrl.config import Config
from tests.actors.fakes import ticket


class FakeChat:
    """A served model that can add: greedily always right, sampled wrong for odd seeds; asks the calculator first where
    it is offered. Task `sum-3` it cannot bear."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.models = ["adder"]
        self.busy = 1
        self.takes_s = 0.0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.tell(200, {"data": [{"id": name} for name in fake.models]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                time.sleep(fake.takes_s)
                fake.keys.add(self.headers.get("Authorization"))
                if fake.busy:
                    fake.busy -= 1
                    return self.tell(503, {})
                fake.asked.append(body)
                a, b = (int(word) for word in body["messages"][0]["content"].rstrip("= ?").split(" + "))
                if a == 3:
                    return self.tell(200, {"choices": []})
                if "tools" in body and len(body["messages"]) == 1:
                    call = {"name": "calculate", "arguments": json.dumps({"expression": f"{a} + {b}"})}
                    message = {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]}
                else:
                    right = body["temperature"] == 0 or body["seed"] % 2 == 0
                    message = {"content": str(a + b if right else a - b)}
                usage = {"completion_tokens": 3, "total_tokens": 20}
                self.tell(200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

            def tell(self, status: int, body: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def fake() -> Iterator[FakeChat]:
    served = FakeChat()
    thread = threading.Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i} + 1 = ?", "ground_truth": str(i + 1), "id": f"sum-{i}"} for i in range(1, 9)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"source": "json_lines", "options": {"path": "tasks.jsonl", "held_out_size": 4}}
    single = {"name": "single_turn", "options": {"score": "exact_match"}}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "data": {"source": "mix", "options": {"sources": {"plain": source, "tools": source}}},
                "env": {
                    "name": "mix",
                    "options": {"envs": {"plain": single, "tools": {"name": "calculator"}}},
                    "retries": 0,
                },
                "actors": {"slots": 4, "temperature": 0.7},
                "eval": {"tasks": 8, "samples": 4, "success": "score"},
            }
        )
    )
    return tmp_path / "config.json"


def evaluated(*words: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(["eval", *words])
    return end.value.code


def test_a_served_model_is_measured_per_environment(
    fake: FakeChat, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-key")
    out = tmp_path / "out.json"
    words = ["--config", str(config), "--endpoint", fake.url, "--api-key-env", "MY_KEY", "--out", str(out)]
    code = evaluated(*words)
    said = capsys.readouterr()
    assert code == 0, said.err
    told = json.loads(out.read_text())
    assert told["endpoint"] == fake.url
    greedy, sampled = told["greedy"], told["at temperature 0.7"]
    assert set(greedy) == {"all", "plain", "tools"}
    # Those of task sum-3, where it is held out, failed: they are no wrong answers.
    assert {(found["share"], found["tasks"] + found["failed"]) for name, found in greedy.items() if name != "all"} == {
        (1.0, 4)
    }
    assert greedy["all"]["failed"] == sampled["all"]["failed"] / 4
    assert 0 < sampled["all"]["share"] < 1
    assert sampled["all"]["low"] < sampled["all"]["share"] < sampled["all"]["high"]
    assert sampled["all"]["share"] <= sampled["all"]["pass_at"]["2"] <= sampled["all"]["pass_at"]["4"]
    assert fake.keys == {"Bearer secret-key"}
    assert "secret-key" not in said.out + said.err + out.read_text()
    turns = Counter(len(body["messages"]) for body in fake.asked if "tools" in body)
    assert turns[3] > 0, "question, call, result"
    assert set(turns) == {1, 3}
    for body in fake.asked:
        if len(body["messages"]) == 3:
            question, _, result = body["messages"]
            assert result["content"] == str(int(question["content"].split()[0]) + 1)
    assert {body["model"] for body in fake.asked} == {"adder"}


def test_an_episode_that_takes_too_long_says_so(
    fake: FakeChat, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.takes_s = 0.5
    limits = ["--actors.episode-s", "0.2", "--actors.episode-idle-s", "0.1", "--eval.tasks", "2", "--eval.samples", "1"]
    assert evaluated("--config", str(config), "--endpoint", fake.url, *limits) == 1
    said = capsys.readouterr()
    assert "held-out task 0, attempt 1: not over within 0.2 s" in said.out
    assert "all 2 episodes failed" in said.err


@pytest.fixture
def own_endpoint() -> Iterator[str]:
    """The endpoint that agents are given by an actor, with the quickstart's model behind it, which answers greedily."""
    from asyncrl.actors.endpoint.server import EndpointServer
    from asyncrl.actors.endpoint.session import Session
    from asyncrl.actors.engines import build_engine
    from asyncrl.actors.episodes.progress import EpisodeLimits, Progress
    from asyncrl.rendering.build import build_renderer

    served: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()

    async def serve() -> None:
        config = Config.model_validate(QUICKSTART)
        engine, over = build_engine(config), asyncio.Event()
        await engine.start()
        limits = dataclasses.replace(EpisodeLimits.of(config), max_turns=10_000)  # of all episodes: to it they are one
        session = Session(ticket(kind="eval"), engine, build_renderer(config), limits, Progress(0.0))
        async with EndpointServer("quickstart", limits.max_tokens) as endpoint:
            with endpoint.open(session) as url:
                served.set_result((asyncio.get_running_loop(), over, url))
                await asyncio.wait_for(over.wait(), 100)
        await session.requests.close()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, over, url = served.result(60)
    yield url
    loop.call_soon_threadsafe(over.set)
    thread.join(30)


QUICKSTART = {
    "model": {"path": "quickstart"},
    "data": {"source": "lookup"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256},
    "actors": {"slots": 8, "max_new_tokens": 48},
    "eval": {"tasks": 24},
}


@pytest.mark.system
def test_the_actors_own_endpoint_measures_what_the_checkpoint_does(own_endpoint: str, tmp_path: Path) -> None:
    config, folder = tmp_path / "config.json", Path(asyncrl.quickstart.__path__[0]) / "checkpoint"
    config.write_text(json.dumps(QUICKSTART))
    told = {}
    for way, where in (("--endpoint", own_endpoint), ("--checkpoint", str(folder))):
        assert evaluated("--config", str(config), way, where, "--out", str(tmp_path / "out.json")) == 0
        told[way] = json.loads((tmp_path / "out.json").read_text())["greedy"]["all"]
    assert told["--endpoint"]["episodes"] == 24
    assert told["--checkpoint"]["share"] > 0.2
    assert told["--endpoint"]["share"] == pytest.approx(told["--checkpoint"]["share"], abs=1.5 / 24)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either --checkpoint FOLDER or --endpoint URL"),
        (["--endpoint", "URL", "--checkpoint", "x"], "either --checkpoint FOLDER or --endpoint URL"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "does not list its models"),
        (["--endpoint", "URL"], "serves adder, subtracter: choose with --served-name"),
        (["--endpoint", "URL", "--api-key-env", "NO_SUCH"], "--api-key-env is 'NO_SUCH', which is not set"),
    ],
)
def test_what_cannot_work_is_said(
    fake: FakeChat, config: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    fake.models.append("subtracter")
    code = evaluated("--config", str(config), *(fake.url if word == "URL" else word for word in words))
    assert (code, said in capsys.readouterr().err) == (2, True)
