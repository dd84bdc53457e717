"""A model that was just trained, served by real vLLM as the page says; by `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.request
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here (`make test-vllm` runs these tests)", allow_module_level=True)

from tests.test_trained_model import FOLDER, PAGE
from tests.trained import train
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.timeout(500)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("lookup", "calculate")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = train(tmp_path_factory.mktemp("trained"))
    (line,) = re.findall(r"^vllm serve (.*)$", PAGE.read_text(), re.MULTILINE)
    model, *options = line.replace(FOLDER, str(folder)).split()
    with vllm_server(model, *options) as url:
        yield f"{url}/v1"


def test_it_calls_its_tools_for_any_openai_client(url: str) -> None:
    body = {
        "model": "my-agent", "temperature": 0, "max_tokens": 48, "tools": TOOLS,
        "messages": [{"role": "user", "content": "What is fox + owl?"}],
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.loads(answer.read())["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "lookup"
    assert json.loads(call["function"]["arguments"])["key"] in ("fox", "owl")


def test_asyncrl_try_plays_with_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncrl.cli import main

    with pytest.raises(SystemExit) as end:
        main(["try", "--config", "quickstart", "--url", url, "--tasks", "2"])
    assert end.value.code == 0
    assert "-> calls lookup {" in capsys.readouterr().out
