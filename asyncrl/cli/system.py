"""Whether this system has the calls without which no command works."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from asyncrl.errors import ConfigError

CALLS = ("fcntl", "resource")
"""Modules of Python for locks of files and limits of processes; Windows has neither."""


def check() -> None:
    """Raises ConfigError, with the remedy, before an import fails somewhere."""
    for module in CALLS:
        try:
            importlib.import_module(module)
        except ImportError:
            raise ConfigError(
                f"asyncrl runs on Linux, and this is {sys.platform}, without {module}: use a Linux machine, a container"
                " or WSL 2."
            ) from None


def hidden_module(error: ImportError | AttributeError) -> str:
    """The sentence for an error that follows from a file of the working folder with the name of a module that asyncrl
    imports; empty for another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    module = sys.modules.get(name) if name else error.obj if isinstance(error, AttributeError) else None
    file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    if not file or Path(file).parent != Path.cwd():
        return ""
    return (
        f"{Path(file).name} in this folder hides the module of this name that asyncrl needs ({type(error).__name__}: "
        f"{error}): rename the file, or start asyncrl in another folder."
    )
