"""Counts the files and code lines that one trajectory passes through in a real run: ticket to loaded weights.

    python scripts/way/count.py [--tree DIR]

The quickstart is run for a few steps. From its second training step on, every file of asyncrl of which a function is
called in the actor, the buffer or the learner is noted (sitecustomize.py): so start-up is left out, and imports and
docstrings decide nothing. Files of the run's machinery (process, launch, tracking, config, sockets ...) are listed
apart. A code line holds code: no blank, comment or docstring. `--tree` counts another checkout, so that two can be
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from code_lines import code_lines  # noqa: E402

MACHINERY = (
    "process", "launch", "tracking", "config", "cli", "sockets", "errors", "plugins", "run_folder", "keys", "parent",
    "leftovers", "evaluation",
)  # fmt: skip
"""First parts of paths below asyncrl/ that belong to every process of a run, not to a trajectory."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--json", type=Path, help="also write the result here")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as noted:
        run(words.tree, Path(noted))
        entered = files(words.tree, Path(noted))
    lines = {name: code_lines(words.tree / "asyncrl" / name) for name in sorted(entered)}
    machinery = {name for name in lines if name.split("/")[0].partition(".")[0].partition("_")[0] in MACHINERY}
    machinery |= {name for name in lines if name.removesuffix(".py") in MACHINERY}
    way = [name for name in lines if name not in machinery]
    for name in way:
        print(f"{lines[name]:5}  {name}")
    print(f"{sum(lines[name] for name in way):5}  code lines in {len(way)} files on the way of a trajectory")
    print(f"{sum(lines[name] for name in machinery):5}  code lines in {len(machinery)} files of machinery: not counted")
    if words.json:
        words.json.write_text(json.dumps({"files": len(way), "lines": {name: lines[name] for name in way}}, indent=1))


if __name__ == "__main__":
    main()
