"""The scripts of the repository, as modules: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "scripts"


def script(path: str) -> ModuleType:
    """`path`: below scripts/."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, FOLDER / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module
