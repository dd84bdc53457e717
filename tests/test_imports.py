"""What the parts of asyncrl load when they are imported; who may import whom: tests/test_contracts.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"
PROCESSES = ("actors", "buffer", "learner", "scorer")
HEAVY = ("torch", "transformers", "vllm", "ray", "wandb", "trackio", "matplotlib", "datasets")


def files(package: str) -> list[Path]:
    found = sorted((PACKAGE / package).rglob("*.py"))
    assert found, f"asyncrl/{package} holds no files"
    return found


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


def test_the_root_shows_the_processes() -> None:
    for name in PROCESSES:
        link = PACKAGE.parent / name
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name
