"""What an actor or the learner loads of the buffer, when it opens the door."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import asyncrl
from tests.test_imports import imports

CLIENT = Path(asyncrl.__file__).parent / "buffer" / "client"
BEHIND = ("asyncrl.buffer", "asyncrl.actors", "asyncrl.learner")
ALLOWED = ("asyncrl.buffer", "asyncrl.buffer.record", "asyncrl.buffer.client")


def allowed(module: str) -> bool:
    behind = any(module == name or module.startswith(name + ".") for name in BEHIND)
    return not behind or module in ALLOWED or module.startswith("asyncrl.buffer.client.")


def loaded(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split())


def test_the_door_loads_nothing_else_of_the_buffer() -> None:
    modules = [f"asyncrl.buffer.client.{file.stem}" for file in CLIENT.glob("*.py") if file.stem != "__init__"]
    door = loaded(*modules)
    assert {"asyncrl.buffer.client.retry", "asyncrl.buffer.record"} <= door
    assert [module for module in sorted(door) if not allowed(module)] == []
    assert not {"sqlite3", "pydantic"} & door
    assert len([module for module in door if module.startswith("asyncrl")]) < 20


def test_it_reaches_nothing_else_lazily_either() -> None:
    """Through any file of the package that it reaches, also inside a function."""
    seen, left = set[Path](), sorted(CLIENT.glob("*.py"))
    while left:
        file = left.pop()
        seen.add(file)
        for name in imports(file):
            assert allowed(name) or allowed(name.rpartition(".")[0]), f"{file} imports {name}"
            left += [found for found in files_of(name) if found not in seen]
    assert CLIENT.parent / "record.py" in seen
    assert CLIENT.parent / "core.py" not in seen


def files_of(name: str) -> list[Path]:
    """The file of a module, or of the module that holds the name; only of this package, and not its lazy face."""
    for module in (name, name.rpartition(".")[0]):
        path = CLIENT.parents[2].joinpath(*module.split("."))
        if module.startswith("asyncrl.") and path.with_suffix(".py").is_file():
            return [path.with_suffix(".py")]
    return []


def test_the_check_would_see_the_ledger() -> None:
    assert not allowed("asyncrl.buffer.ledger.ledger")
    assert not allowed("asyncrl.buffer.ledger")
    assert "asyncrl.buffer.ledger.database" in loaded("asyncrl.buffer.core")
    tree = ast.parse("def f():\n    from asyncrl.buffer.ledger import group\n")
    assert [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] == ["asyncrl.buffer.ledger"]
