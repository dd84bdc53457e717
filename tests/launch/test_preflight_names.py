from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_names

AGENTS = """
async def agent(task, client, *, tries: int = 1): ...
def plain(task, client): ...
"""


@pytest.fixture
def agents(tmp_path: Path) -> str:
    (tmp_path / "agents_here.py").write_text(AGENTS)
    return str(tmp_path / "agents_here.py")


@pytest.mark.parametrize("name", ["agent", "plain"])
def test_an_agent_is_a_name_of_env(agents: str, name: str) -> None:
    check_names(Config(env={"name": f"{agents}:{name}"}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trys": 2}, r"env\.options\.trys: agent has no such option \(did you mean 'tries'\?\)"),
        ({"tries": "two"}, r"env\.options\.tries: 'two' does not suit agent"),
        ({"client": 1}, r"env\.options\.client: is passed to agent by asyncrl itself"),
    ],
)
def test_what_an_agent_does_not_take_is_refused(agents: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_names(Config(env={"name": f"{agents}:agent", "options": options}))


def test_an_agent_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package_here\n")
    with pytest.raises(ConfigError, match=r"env\.name is .*fails when it is imported: ModuleNotFoundError"):
        check_names(Config(env={"name": f"{tmp_path / 'broken.py'}:agent"}))
