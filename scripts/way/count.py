"""Counts the files and code lines that one trajectory passes through in a real run: ticket to loaded weights.

    python scripts/way/count.py [--tree DIR] [--json FILE]
    python scripts/way/count.py --read FILE

The quickstart is run for a few steps. From its second training step on, every file of asyncrl of which a function is
called in the actor, the buffer or the learner is noted (sitecustomize.py): so start-up is left out, and imports and
docstrings decide nothing. Files of the run's machinery (process, launch, tracking, config, sockets ...) are listed
apart. A code line holds code: no blank, comment or docstring. `--tree` counts another checkout, so that two can be
compared; `--read` prints a result that `--json` has written.

Two numbers are printed. `all`: every such file. `must enter`: without the files of NEEDED, which a reader of the way
takes for granted until he asks how they do it: how tokens are generated, messages rendered, leases kept, tables stored,
checkpoints written and processes started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from code_lines import code_lines  # noqa: E402

MACHINERY = (
    "process", "launch", "tracking", "config", "cli", "sockets", "errors", "plugins", "run_folder", "keys", "parent",
    "leftovers", "evaluation",
)  # fmt: skip
"""First parts of paths below asyncrl/ that belong to every process of a run, not to a trajectory."""
NEEDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "engine internals": (("actors/engines/",), ("actors/engines/",)),
    "renderer": (("actors/renderer.py", "actors/tool_calls.py"), ("rendering/",)),
    "leases": (("actors/leases.py", "buffer/leases.py"), ("actors/leases.py", "buffer/tickets/leases.py")),
    "ledger tables": (
        ("buffer/database.py", "buffer/schema.py", "buffer/bias.py"),
        ("buffer/ledger/storage/database.py", "buffer/ledger/storage/schema.py", "buffer/ledger/drop_bias.py"),
    ),
    "checkpoints": (
        ("learner/checkpoints.py", "learner/background.py", "buffer/snapshot.py", "buffer/retention.py"),
        ("learner/checkpoints/", "buffer/ledger/storage/snapshot.py", "buffer/retention.py"),
    ),
    "start-up": (
        ("actors/__main__.py", "buffer/__main__.py", "learner/__main__.py"),
        ("actors/__main__.py", "buffer/__main__.py", "learner/__main__.py"),
    ),
}
"""Prefixes of paths below asyncrl/ that the way needs and that need not be entered to follow it: those of the tree
before the rebuild (b0c3e2c), and those of this one."""
ROLES = ("asyncrl.actors", "asyncrl.buffer", "asyncrl.learner")


def run(tree: Path, noted: Path) -> None:
    """Runs the quickstart of `tree` with every process noting its files in `noted`."""
    command = [sys.executable, "-m", "asyncrl", "launch", "--config", "configs/quickstart.yaml"]
    with tempfile.TemporaryDirectory() as runs:
        flags = ["--learner.steps", "8", "--eval.tasks", "0", "--launch.runs-dir", runs, "--launch.name", "way"]
        environment = os.environ | {
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{tree}",
            "ASYNCRL_WAY": str(noted),
        }
        process = subprocess.Popen([*command, *flags], cwd=tree, env=environment, stdout=subprocess.DEVNULL)
        metrics = Path(runs) / "way" / "metrics.jsonl"
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.is_file() and metrics.read_text().count("\n") >= 2:
                (noted / "now").touch()
            time.sleep(0.1)
        process.terminate()
        if process.wait(60) or not (noted / "now").exists():
            raise SystemExit(f"the run of {tree} ended with {process.returncode}, before anything was counted.")


def files(tree: Path, noted: Path) -> set[str]:
    """Paths below asyncrl/ that an actor, the buffer or the learner ran."""
    found: set[str] = set()
    for file in noted.glob("*.txt"):
        lines = file.read_text().splitlines()
        if lines and any(role in lines[0] for role in ROLES):
            found |= {line.rpartition("/asyncrl/")[2] for line in lines[1:]}
    return {name for name in found if (tree / "asyncrl" / name).is_file()}


def must_enter(names: Iterable[str]) -> list[str]:
    """The files among `names`, of either tree, that are in no group of NEEDED."""
    prefixes = tuple(prefix for trees in NEEDED.values() for tree in trees for prefix in tree)
    return [name for name in names if not name.startswith(prefixes)]


def print_way(lines: Mapping[str, int]) -> None:
    """Prints the code lines of each file of the way, and the two numbers."""
    entered = must_enter(lines)
    for name, count in lines.items():
        print(f"{count:5}  {name}{'' if name in entered else '  (needed, not entered)'}")
    print(f"{sum(lines[name] for name in entered):5}  code lines in {len(entered)} files that a trajectory must enter")
    print(f"{sum(lines.values()):5}  code lines in all {len(lines)} files on the way of a trajectory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--read", type=Path, help="print the result in this file, and run nothing")
    words = parser.parse_args()
    if words.read:
        print_way(json.loads(words.read.read_text())["lines"])
        return
    with tempfile.TemporaryDirectory() as noted:
        run(words.tree, Path(noted))
        entered = files(words.tree, Path(noted))
    lines = {name: code_lines(words.tree / "asyncrl" / name) for name in sorted(entered)}
    machinery = {name for name in lines if name.split("/")[0].partition(".")[0].partition("_")[0] in MACHINERY}
    machinery |= {name for name in lines if name.removesuffix(".py") in MACHINERY}
    way = {name: count for name, count in lines.items() if name not in machinery}
    print_way(way)
    print(f"{sum(lines[name] for name in machinery):5}  code lines in {len(machinery)} files of machinery: not counted")
    if words.json:
        words.json.write_text(json.dumps({"files": len(way), "lines": way}, indent=1))


if __name__ == "__main__":
    main()
