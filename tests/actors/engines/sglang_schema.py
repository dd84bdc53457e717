"""SGLang's own schema of its HTTP interface, read out of its wheel, which `make test` fetches and does not install.

Installed it would be a package that cannot be imported: it asks for another torch and for CUDA.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

WHEELS = Path(sys.prefix) / "wheels"
FILE = "sglang/api/v1/api_types.py"


def schema() -> ModuleType:
    """Skips the test where SGLang has no wheel for the platform."""
    found = sorted(WHEELS.glob("sglang-*.whl"))
    if not found:
        pytest.skip(f"no SGLang wheel in {WHEELS}: `make test` fetches it where there is one for this platform")
    module = ModuleType("sglang_api_types")
    sys.modules[module.__name__] = module  # its decorators look the module up
    with zipfile.ZipFile(found[-1]) as wheel:
        exec(compile(wheel.read(FILE), FILE, "exec"), module.__dict__)
    return module
