"""Checks that the links, anchors, files and modules that README.md, CONTRIBUTING.md and docs/ mention exist.

Prints `file:line: what is missing` for each that does not exist, and exits 1 if there is any. Part of `make lint`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"\]\(([^()\s]+)\)")
PATH = re.compile(
    r"(?<![\w./{}:-])(?:asyncrl|bench|configs|docs|examples|requirements|scripts|tests)/[\w./*-]*[\w*/](?![\w{<])"
)
MODULE = re.compile(r"(?<![\w./-])asyncrl(?:\.\w+)+")
HEADING = re.compile(r"#{1,6} +(.+)")


def pages(root: Path) -> list[Path]:
    return [p for p in (root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md"))) if p.exists()]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings; the second of two equal ones ends in -1."""
    names: set[str] = set()
    seen: dict[str, int] = {}
    fenced = False
    for line in page.read_text().splitlines():
        fenced ^= line.startswith("```")
        heading = HEADING.match(line)
        if fenced or not heading:
            continue
        text = LINK.sub("]", heading[1]).lower()
        name = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        count = seen.get(name, 0)
        seen[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def link_fault(page: Path, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):  # https:, mailto:
        return None
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists():
        return f"link to {target}: no such file"
    if anchor and anchor not in anchors(file):
        return f"link to {target}: {file.name} has no heading with this anchor"
    return None


def path_fault(root: Path, path: str) -> str | None:
    if "*" in path:
        return None if any(root.glob(path)) else f"{path}: matches no file"
    return None if (root / path).exists() else f"{path}: no such file"


def module_fault(root: Path, name: str) -> str | None:
    """None if the longest part of `name` that is a module defines, imports or mentions the part behind it."""
    where = root
    for part in name.split("."):
        if (where / part).is_dir():
            where /= part
            continue
        if (where / f"{part}.py").is_file():
            return None
        face = where / "__init__.py"
        if face.is_file() and re.search(rf"\b{part}\b", face.read_text()):
            return None
        return f"{name}: {where.relative_to(root)} has no {part}"
    return None


def faults(root: Path) -> Iterator[str]:
    for page in pages(root):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            found = [link_fault(page, target) for target in LINK.findall(line)]
            rest = LINK.sub("]", line)
            found += [path_fault(root, path) for path in PATH.findall(rest)]
            found += [module_fault(root, name) for name in MODULE.findall(rest)]
            yield from (f"{page.relative_to(root)}:{number}: {fault}" for fault in found if fault)


def main() -> int:
    missing = list(faults(ROOT))
    print("\n".join(missing) if missing else f"links: {len(pages(ROOT))} pages, nothing missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
