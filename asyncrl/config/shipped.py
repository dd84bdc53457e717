"""The configurations that come with asyncrl: `--config quickstart` works in any folder.

`asyncrl/configs` is a link to the `configs/` of the repository, which is their one source; a wheel holds a copy of
those that name no file outside the package.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from asyncrl.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "configs"


def names() -> list[str]:
    """The names that `--config` takes in place of a file."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def located(file: Path) -> Path:
    """`file`, or, if there is none and its text is a bare name, the configuration of that name that comes with asyncrl.

    Raises ConfigError for a bare name that is neither.
    """
    name = str(file)
    if file.exists() or "/" in name or (file.suffix and name not in names()):
        return file
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"--config {name}: there is no such file, and no configuration of this name comes with asyncrl{meant}: "
            f"give a YAML file, or one of {', '.join(names())}."
        )
    return FOLDER / f"{name}.yaml"
