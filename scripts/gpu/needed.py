"""Part 0: imports every module that a process of a run imports, and names the packages to bring along.

The modules of each process are imported in a process of its own, as a run does. What is imported inside functions only,
by whatever module, is read from the source and looked up: a package that is missing is named with the files that ask
for it, and with whether a part of the acceptance needs it.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import torch

from scripts.gpu.report import ROOT, Report

PROCESSES: dict[str, tuple[str, ...]] = {
    "launcher": ("asyncrl.cli", "asyncrl.launch.run", "asyncrl.launch.backends.local", "asyncrl.tracking.collector"),
    "buffer": ("asyncrl.buffer.loop",),
    "learner": (
        "asyncrl.learner.loop", "asyncrl.learner.build", "asyncrl.learner.backends.hf.torch",
        "asyncrl.learner.backends.hf.fsdp2", "asyncrl.learner.budget.memory", "asyncrl.weights.device.publisher",
    ),
    "actor": ("asyncrl.actors.loop", "asyncrl.actors.engines.hf.engine", "asyncrl.weights.device.subscriber"),
    "audit": ("asyncrl.audit.command",),
    "report": ("asyncrl.tracking.report.plots",),
}  # fmt: skip
ENGINE = ("asyncrl.actors.engines.vllm.engine", "asyncrl.actors.engines.vllm.worker")
BY_PART = {"vllm": "2, 3, 4"}
"""Packages that no requirement of asyncrl names and a part needs."""
CALLED = {"zmq": "pyzmq", "yaml": "pyyaml", "google": "protobuf", "megatron": "megatron-core"}
"""Packages by the name of their module, where the two differ."""


def run(report: Report) -> None:
    report.section("packages", 1, lambda: _look_up(report))
    report.section("features", 1, lambda: _features(report))
    for process, modules in PROCESSES.items():
        report.section(process, 5, lambda p=process, m=modules: _import(report, p, m))
    if importlib.util.find_spec("vllm") is None:
        report.not_run("modules of the engine", "vllm is not installed")
    else:
        report.section("engine", 5, lambda: _import(report, "engine", ENGINE))


def _import(report: Report, process: str, modules: tuple[str, ...]) -> None:
    line = "import " + ", ".join(modules)
    limit_s = report.left() - 5.0
    done = subprocess.run(
        [sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    said = "imported" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no words"])[-1]
    report.judge(f"modules of the {process}", "imported", said, done.returncode == 0)


def _look_up(report: Report) -> None:
    asked: dict[str, list[str]] = {}
    for path in sorted((ROOT / "asyncrl").rglob("*.py")):
        if "skeletons" in path.parts:
            continue
        for name in set(imported(path.read_text())):
            asked.setdefault(name, []).append(str(path.relative_to(ROOT)))
    absent = {name: files for name, files in asked.items() if importlib.util.find_spec(name) is None}
    required = requirements()
    pack = []
    for name, files in sorted(absent.items()):
        package = CALLED.get(name, name.replace("_", "-"))
        parts = "all" if package in required else BY_PART.get(name)
        who = f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else files[0]
        report.figure(f"absent: {package}", f"{who}; needed by {f'parts: {parts}' if parts else 'none of the parts'}")
        pack += [package] if parts else []
    report.judge("packages to bring along", "none", pack or "none", not pack)


def imported(source: str) -> Iterator[str]:
    """The packages that a module imports anywhere, without those of Python and asyncrl itself.

    >>> sorted(imported("import os, zmq.asyncio\\ndef f():\\n    from yaml import safe_load\\nfrom . import x"))
    ['yaml', 'zmq']
    """
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in (name.partition(".")[0] for name in names):
            if name not in sys.stdlib_module_names and name != "asyncrl":
                yield name


def requirements() -> frozenset[str]:
    """The names of the packages without which asyncrl cannot be installed."""
    import re
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return frozenset(re.split(r"[><=\[ ]", entry)[0] for entry in listed)


def _features(report: Report) -> None:
    """What attention, loader and engine choose by."""
    for name in ("torch.nn.attention.varlen", "flash_attn_interface", "triton", "liger_kernel", "transformer_engine"):
        report.figure(f"there is {name}", found(name))
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        report.judge("memory of the GPU that is free", "at least 0.95", free / total, free / total >= 0.95)
        report.figure("bfloat16 matrix product [TFLOP/s]", product())


def found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def product(side: int = 8192, repeats: int = 10) -> float:
    """TFLOP/s: what the figures of the other parts can be compared with."""
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        a @ b
    begun.record()
    for _ in range(repeats):
        a @ b
    ended.record()
    torch.cuda.synchronize()
    return 2 * side**3 * repeats / begun.elapsed_time(ended) / 1e9
