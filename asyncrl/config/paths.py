"""Files that a configuration names: where they are meant, and made absolute, so that a run resumes from anywhere.

A relative path in a config file is looked up beside that file, then in the folder where the command is given; one in a
flag is looked up there only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_CODE = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_][\w.]*)")
_PATH_KEY = re.compile(r"(?:.*_)?paths?")


def anchored(values: Any, folders: Sequence[Path], key: str = "") -> Any:
    """`values` with every file found in one of `folders` made absolute.

    A file is a text `path/to/file.py:name`, wherever it stands, and the value (or each item) of an option called
    `path` or `paths` or ending in `_path` or `_paths`; `*` in it is a pattern. A text that names nothing there is left
    as it is: it may be a hub name, and what is missing is for its reader to say.
    """
    if isinstance(values, dict):
        return {name: anchored(value, folders, str(name)) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(anchored(value, folders, key) for value in values)
    if not isinstance(values, str):
        return values
    if code := _CODE.fullmatch(values):
        return f"{_found(code['file'], folders)}:{code['name']}"
    return _found(values, folders) if _PATH_KEY.fullmatch(key) else values


def _found(path: str, folders: Sequence[Path]) -> str:
    relative = Path(path).expanduser()
    if relative.is_absolute() or not path:
        return str(relative)
    for folder in folders:
        if (folder / relative).exists() or ("*" in path and any(folder.glob(path))):
            return str((folder / relative).resolve())
    return path
