"""The rules of the house about who imports whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"
PROCESSES = ("actors", "buffer", "learner")
DOOR = "asyncrl.buffer.client"
HEAVY = ("torch", "transformers", "vllm", "ray", "wandb", "trackio", "matplotlib", "datasets")


def imports(file: Path) -> Iterator[str]:
    """Full names of what a file imports anywhere in it, lazily or not."""
    here = ["asyncrl", *file.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) + "." if node.level else ""
            # `from asyncrl import buffer` imports asyncrl.buffer.
            yield from (f"{base}{node.module or ''}.{alias.name}".replace("..", ".") for alias in node.names)


def files(package: str) -> list[Path]:
    found = sorted((PACKAGE / package).rglob("*.py"))
    assert found, f"asyncrl/{package} holds no files"
    return found


@pytest.mark.parametrize("package", PROCESSES)
def test_the_three_processes_never_import_each_other(package: str) -> None:
    others = tuple(f"asyncrl.{other}" for other in PROCESSES if other != package)
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files(package)
        for name in imports(file)
        if any(name == other or name.startswith(other + ".") for other in others)
        and not (name == DOOR or name.startswith(DOOR + "."))
    ]
    assert wrong == []


def test_the_walk_sees_every_way_to_import(tmp_path: Path) -> None:
    """A check of the check: relative, lazy, aliased."""
    file = PACKAGE / "actors" / "imagined.py"
    text = "from asyncrl import buffer\nfrom ..buffer import core\ndef f():\n    import asyncrl.learner as x\n"
    tree_of = {"read_text": lambda self: text, "relative_to": lambda self, p: file.relative_to(p)}
    imagined = type("Imagined", (), tree_of)()
    assert list(imports(imagined)) == ["asyncrl.buffer", "asyncrl.buffer.core", "asyncrl.learner"]


def test_the_buffer_never_mentions_torch() -> None:
    assert [f.name for f in files("buffer") for name in imports(f) if name.split(".")[0] in HEAVY] == []


def loaded_by(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "modules",
    [
        ("asyncrl", "asyncrl.cli", "asyncrl.config.flags"),
        ("asyncrl.weights.network.server", "asyncrl.weights.network.mirror", "asyncrl.weights.channels"),
        ("asyncrl.launch.api", "asyncrl.launch.run", "asyncrl.launch.guardian", "asyncrl.tracking.collector"),
        ("asyncrl.actors.envs", "asyncrl.data", "asyncrl.trajectory", "asyncrl.wire", "asyncrl.tracking.reporter"),
    ],
)
def test_what_starts_fast_stays_light(modules: tuple[str, ...]) -> None:
    assert loaded_by(*modules) == set()


def test_the_buffer_process_loads_nothing_heavy() -> None:
    modules = [
        "asyncrl." + ".".join(f.relative_to(PACKAGE).with_suffix("").parts)
        for f in files("buffer")
        if f.name != "__main__.py"
    ]
    assert loaded_by(*(m.removesuffix(".__init__") for m in modules)) == set()


def test_the_guardian_starts_with_next_to_nothing() -> None:
    code = "import sys, asyncrl.launch.guardian; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split()
    assert not {"pydantic", "numpy", "zmq", "rich", "tyro"} & set(loaded)


def test_the_root_shows_the_three_processes() -> None:
    for name in PROCESSES:
        link = PACKAGE.parent / name
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name
