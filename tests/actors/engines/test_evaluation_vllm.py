"""`asyncrl eval --endpoint` with a real vLLM server; runs where vLLM is installed, by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

import asyncrl.quickstart
from asyncrl.cli import main
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.timeout(300)

CHECKPOINT = Path(asyncrl.quickstart.__path__[0]) / "checkpoint"
CONFIG = {
    "model": {"path": "quickstart"},
    "data": {"source": "lookup"},
    "env": {"name": "lookup", "max_turns": 6, "max_tokens": 256},
    "actors": {"slots": 16, "max_new_tokens": 48},
    "eval": {"tasks": 100, "samples": 2},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """As anybody would serve a model that calls tools (docs/how-to/rewards.md), with what a CPU wants added."""
    with vllm_server(str(CHECKPOINT), "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as url:
        yield f"{url}/v1"


def measured(tmp_path: Path, config: dict[str, Any], *words: str) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as end:
        main(["eval", "--config", str(tmp_path / "config.json"), *words, "--out", str(out)])
    assert end.value.code == 0
    return json.loads(out.read_text())


def test_it_measures_what_the_checkpoint_itself_does(url: str, tmp_path: Path) -> None:
    served = measured(tmp_path, CONFIG, "--endpoint", url)
    played = measured(tmp_path, CONFIG, "--checkpoint", str(CHECKPOINT))
    assert {found["all"]["failed"] for found in (served["greedy"], served["at temperature 1"])} == {0}
    assert played["greedy"]["all"]["share"] > 0.2, "it calls tools: else nothing here is measured"
    assert served["greedy"]["all"]["share"] == pytest.approx(played["greedy"]["all"]["share"], abs=0.03)
    ours, theirs = played["at temperature 1"]["all"], served["at temperature 1"]["all"]
    assert ours["low"] < theirs["high"]
    assert theirs["low"] < ours["high"]


def test_a_conversation_that_outgrows_the_model_counts(url: str, tmp_path: Path) -> None:
    env = {"name": "tests.actors.flooding_env:FloodingEnv", "max_turns": 3, "max_tokens": 256, "retries": 0}
    found = measured(tmp_path, CONFIG | {"env": env, "eval": {"tasks": 4}}, "--endpoint", url)
    assert {(way["all"]["reward"], way["all"]["failed"]) for name, way in found.items() if name != "endpoint"} == {
        (1, 0)
    }
