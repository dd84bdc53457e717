"""What an actor or the learner loads of the buffer when it imports the door; what it may reach: the contract `door`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import asyncrl

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
    assert len([module for module in door if module.startswith("asyncrl")]) <= 25


def test_the_check_would_see_the_ledger() -> None:
    assert not allowed("asyncrl.buffer.ledger.ledger")
    assert not allowed("asyncrl.buffer.ledger")
    assert "asyncrl.buffer.ledger.storage.database" in loaded("asyncrl.buffer.core")
