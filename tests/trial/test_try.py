"""`asyncrl try` as a new user gives it: in an empty folder, with the model that comes with asyncrl or a served one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import call
from tests.test_evaluation_endpoint import FakeChat, config, fake

__all__ = ["config", "fake"]  # fixtures

OWN = """
import asyncrl


class Shop(asyncrl.Environment):
    async def reset(self, task):
        self.episode = task["episode"]
        return [{"role": "user", "content": task["prompt"]}]

    async def step(self, message):
        if self.episode == 1:
            raise ValueError("the shop is closed")
        return asyncrl.Turn(messages=[{"role": "user", "content": "What is owl - seal?"}])


async def agent(task, client):
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
    for _ in range(2):  # the same request twice: two rows
        messages = [{"role": "user", "content": task["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
    return {"called": float(bool(answer.choices[0].message.tool_calls)), "index": float(task["episode"])}


async def three(task, client):
    messages = [{"role": "user", "content": task["prompt"]}]
    answer = await client.chat.completions.create(model="policy", messages=messages, n=3)
    return float(len(answer.choices) == 3)


def by_place(task, answers):
    return [float(number) for number in range(len(answers))]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "empty"


def test_the_quickstarts_episodes_are_shown_and_nothing_is_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "try", "--config", "quickstart", "--tasks", "2", "--episodes", "6")
    assert code == 0
    assert out.count("\ntask lookup") + out.startswith("task lookup") == 2
    assert out.count("What is ") == 2  # one conversation of each task
    assert "-> calls lookup {" in out
    assert out.count("  episode ") == 12
    assert "2 tasks, 12 episodes in " in out
    assert list(here.iterdir()) == []


def test_every_conversation_on_request(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "try", "--config", "quickstart", "--tasks", "1", "--episodes", "3", "--all")
    assert out.count("What is ") == 3


def test_what_is_played_is_what_a_run_would_play_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command twice says the same, apart from the seconds."""
    words = ("try", "--config", "quickstart", "--tasks", "1", "--episodes", "4")
    said = [
        [line.partition(" tokens sampled")[0] for line in call(capsys, *words)[1].splitlines() if "episode " in line]
        for _ in range(2)
    ]
    assert said[0][:4] == said[1][:4]


def test_failures_and_limits_are_told_with_their_field(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "shop.py").write_text(OWN)
    words = ["--config", "quickstart", "--tasks", "1", "--env.name", "shop.py:Shop", "--env.max-turns", "2"]
    code, out, _ = call(capsys, "try", *words)
    assert code == 0
    assert "failed: env_error: environment.step: ValueError: the shop is closed" in out
    assert "1 of 4 episodes failed" in out
    assert "all 3 rewards are 0" in out
    assert "3 of 3 episodes were cut by env.max_turns (2)" in out


def test_an_episode_that_fails_ends_those_that_its_group_score_waits_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "shop.py").write_text(OWN)
    words = ["--config", "quickstart", "--tasks", "1", "--env.name", "shop.py:Shop", "--env.max-turns", "2"]
    code, out, _ = call(capsys, "try", *words, "--env.group-score", "shop.py:by_place")
    assert code == 1  # nothing was played to its end
    assert "4 of 4 episodes failed, 1 of them like this: env_error: environment.step: ValueError" in out
    capsys.readouterr()
    code, out, _ = call(
        capsys, "try", "--config", "quickstart", "--tasks", "1", "--env.group-score", "shop.py:by_place"
    )
    assert code == 0
    assert "group: 1.5 on average, 0 to 3" in out


def test_an_agent_is_shown_by_its_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    (here / "shop.py").write_text(OWN)
    code, out, _ = call(capsys, "try", "--config", "quickstart", "--tasks", "1", "--env.name", "shop.py:agent")
    assert code == 0
    assert "row 2    | " in out
    assert "called" in out
    assert "2 turns" in out


def test_a_request_for_several_choices_is_one_turn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    (here / "shop.py").write_text(OWN)
    words = ["--tasks", "1", "--episodes", "2", "--env.name", "shop.py:three", "--env.max-turns", "1"]
    code, out, _ = call(capsys, "try", "--config", "quickstart", *words)
    assert code == 0
    assert out.count("reward 1, done, 1 turn, ") == 2, out
    assert "choice 3 | " in out
    assert "turns    1.0 an episode" in out
    assert "sampled a choice, at most" in out


def test_a_served_model_plays_without_tokens(fake: FakeChat, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.busy = 0
    code, out, _ = call(capsys, "try", "--config", str(config), "--tasks", "4", "--episodes", "2", "--url", fake.url)
    assert code == 0, out
    assert "-> calls calculate {" in out
    assert "3 tokens in " in out
    assert "ended    done" in out
    assert {body["temperature"] for body in fake.asked} == {0.7}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--tasks", "0"], "--tasks is 0"),
        (["--episodes", "-1"], "--episodes is -1"),
        (["--url", "http://127.0.0.1:9/v1"], "--url is 'http://127.0.0.1:9/v1'"),
        (["--url", "http://127.0.0.1:9/v1", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env is 'NO_SUCH_KEY'"),
        (["--env.max-tokens", "100000"], "env.max_tokens is 100000"),
    ],
)
def test_a_mistake_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    code, _, err = call(capsys, "try", "--config", "quickstart", *words)
    assert code == 2
    assert err.startswith("asyncrl: ")
    assert err.count("\n") == 1
    assert named in err


ROWS = """
class Rows:
    train_size, held_out_size = 4, 2

    def task(self, index):
        if index == 1:
            raise KeyError("answer")
        return {"id": f"sum-{index}", "prompt": "1 + 1 = ?", "ground_truth": "2"}

    held_out = task
"""


@pytest.mark.parametrize("served", [True, False])
def test_a_row_that_raises_costs_that_row(
    served: bool, here: Path, fake: FakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "rows.py").write_text(ROWS)
    fake.busy = 0
    given = ["--env.name", "single_turn", "--env.options.score", "exact_match", "--env.retries", "0"]
    words = ["--config", "quickstart", "--data.source", "rows.py:Rows", "--data.options", "{}", *given]
    url = ["--url", fake.url] if served else []
    code, out, err = call(capsys, "try", *words, "--tasks", "4", "--episodes", "2", *url)
    assert code == 0, err
    assert "failed: env_error: data.source gave no task 1: KeyError: 'answer' (rows.py, line " in out
    assert "2 of 8 episodes failed" in out
    if not served:
        return
    code, out, err = call(capsys, "eval", *words, "--eval.tasks", "2", "--endpoint", fake.url)
    assert code == 0, err
    assert "held-out task 1, attempt 1: env_error: " in out
    assert "gave no held-out task 1: " in out
    assert "KeyError: 'answer'" in out
    assert "1 failed in their environment" in out
    assert all("1 + 1" in body["messages"][0]["content"] for body in fake.asked), "the broken row was asked"
