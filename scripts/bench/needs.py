"""What a benchmark needs beside asyncrl, asked for before its first run: one that takes minutes must not end, or leave
a row out, for want of a package that could have been named at once."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

ABSENT = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"


def packages(*names: str, of: str, remedy: str, python: str = sys.executable) -> None:
    """Ends the script, in one sentence, if `python` does not find each of them."""
    if python == sys.executable:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
    else:
        try:
            asked = subprocess.run(
                [python, "-c", ABSENT, *names], check=True, capture_output=True, text=True, timeout=60
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(f"{of} needs {', '.join(names)}, and {python} does not run ({error}): {remedy}.") from None
        missing = asked.stdout.split()
    if missing:
        raise SystemExit(f"{of} needs {', '.join(missing)}, which {python} does not find: {remedy}.")


def program(name: str, *, of: str, remedy: str) -> None:
    """The same for a program in PATH."""
    if shutil.which(name) is None:
        raise SystemExit(f"{of} needs the program {name}, which is not in PATH: {remedy}.")
