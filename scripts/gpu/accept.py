"""Accepts or refuses asyncrl on this machine's GPU: `python scripts/gpu/accept.py --part N`, at most 4 minutes each.

    0 needed      every module of every process is imported; the packages to bring along are named
    1 kernels     the learner's attention against its reference; tokens a second, MFU and memory of a training step
    2 engine      vLLM as asyncrl runs it against bare vLLM; new weights in flight; logprobs exact before and after
    3 sharing     one GPU for both: asynchronous against synchronous, weights by `cuda_ipc` while training goes on
    4 end-to-end  configs/one-gpu.yaml with a random Qwen3-0.6B: weights change, the reward rises, the audit is exact

Every part is run by itself and may be run again. A line with goal, measured value and verdict is printed and written to
OUT/gpu-NAME.json as soon as it is known. The exit code is 0 if no goal was missed, 1 if one was, 3 if the part's time
was up. `--tiny` runs the same code with tiny shapes on a CPU, to test the script; its verdicts are `not run on a GPU`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()
"""Before the imports that take long: the part's time includes them."""
ROOT = Path(__file__).parents[2]
PARTS = ("needed", "kernels", "engine", "sharing", "end-to-end")
# Not this folder, whose files have the names of packages that others look for (`kernels`); the benchmarks find each
# other by their names alone.
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "scripts" / "bench"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=range(len(PARTS)), required=True)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU: tests the script")
    parser.add_argument("--out", type=Path, help="folder of the results; default: bench/results, or with --tiny WORK")
    parser.add_argument("--work", type=Path, default=ROOT / "bench" / "work" / "gpu", help="for models and runs")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # Processes of a run import asyncrl from here, whether it is installed or not.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    name = PARTS[args.part]
    work = args.work / name
    part = importlib.import_module("scripts.gpu." + name.replace("-", "_"))
    if args.cell:
        part.cell(args.cell, work, args.tiny)
        return 0
    from scripts.gpu.report import Report

    if not args.tiny and args.part:
        import torch

        if not torch.cuda.is_available():
            print(
                f"Not run: torch sees no CUDA device, and part {args.part} needs one. --tiny tests the script on a CPU."
            )
            return 2
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    out = args.out or (args.work if args.tiny else ROOT / "bench" / "results")
    report = Report(name, out, tiny=args.tiny, begun=BEGUN)
    part.run(report, work) if args.part > 1 else part.run(report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
