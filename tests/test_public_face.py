"""What `import asyncrl` gives, and that it costs nothing until it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl
import asyncrl.launch.loop  # a package beside the function `train`

HEAVY = ("torch", "transformers", "ray", "vllm", "pydantic", "zmq", "numpy", "tyro", "yaml")


def python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)


def test_the_import_loads_nothing_heavy() -> None:
    loaded = set(python("import sys, asyncrl; print(*sys.modules)").split())
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("asyncrl")} == {"asyncrl"}


def test_an_environment_is_written_without_torch() -> None:
    loaded = python(
        "import sys, asyncrl; asyncrl.Environment, asyncrl.Turn, asyncrl.Config; print(*sys.modules)"
    ).split()
    assert {"torch", "ray", "vllm"}.isdisjoint(loaded)


@pytest.mark.parametrize("name", asyncrl.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(asyncrl, name)
    assert inspect.getdoc(value)
    assert name in dir(asyncrl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Environmnt'"):
        asyncrl.Environmnt  # noqa: B018


def test_an_environment_needs_reset_and_step_only() -> None:
    class Guess(asyncrl.Environment):
        async def reset(self, task: object) -> list[object]:
            return []

        async def step(self, message: object) -> asyncrl.Turn:
            return asyncrl.Turn([], reward=1.0, done=True)

    assert Guess().tools == ()
    assert inspect.iscoroutinefunction(Guess().close)


def test_the_glossary_names_files_that_exist() -> None:
    words = (asyncrl.__doc__ or "").replace(":", " ").replace(",", " ").replace(";", " ").split()
    files = [word for word in words if "/" in word or word.endswith(".py")]
    assert len(files) > 8
    assert [file for file in files if not (Path(asyncrl.__file__).parent / file).exists()] == []
