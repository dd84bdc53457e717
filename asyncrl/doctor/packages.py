"""The packages: Python, torch with its GPUs, and the engines. Nothing heavy is imported unless a GPU is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.config import Config
from asyncrl.doctor.finding import Finding
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.installed import check_engine

SMI_S = 20.0
ENGINES: Mapping[str, str] = {"vllm": "vllm", "vllm_server": "httpx", "sglang": "httpx"}
"""By `actors.engine`: the module that it needs. `hf` needs what asyncrl needs anyway."""


def look(config: Config) -> Iterator[Finding]:
    yield python(sys.version_info[:3], sys.executable)
    torch, gpus = _version("torch"), _gpus()
    yield packages({name: _version(name) for name in ("torch", "transformers", "asyncrl")})
    yield from gpu(gpus, torch, _devices() if gpus and torch else 0)
    yield engines(config, [name for name, module in ENGINES.items() if importlib.util.find_spec(module)])


def python(version: Sequence[int], executable: str) -> Finding:
    text = ".".join(map(str, version))
    if tuple(version) < (3, 11):
        return Finding("fix", "python", f"{text}: asyncrl needs 3.11 or newer; make an environment with one.")
    return Finding("ok", "python", f"{text}, {executable}")


def packages(versions: Mapping[str, str | None]) -> Finding:
    if missing := [name for name, version in versions.items() if version is None]:
        return Finding("fix", "packages", f"{', '.join(missing)} not installed: pip install asyncrl again.")
    return Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def gpu(gpus: Sequence[str] | None, torch: str | None, devices: int) -> Iterator[Finding]:
    """`gpus`: what nvidia-smi lists, None: it is not there. `devices`: how many of them torch sees."""
    if gpus is None:
        yield Finding("ok", "gpus", "none (no nvidia-smi): actors and learner run on the CPU")
    elif not gpus:
        yield Finding("fix", "gpus", "nvidia-smi is there and lists none: is the driver loaded, or a device given?")
    elif devices < len(gpus):
        build = "a CPU build" if torch and "+cpu" in torch else "for another version of CUDA, or some are hidden"
        text = f"{'; '.join(gpus)}: torch {torch} sees {devices} of {len(gpus)}; it is {build}. Install torch for CUDA."
        yield Finding("fix", "gpus", text)
    else:
        yield Finding("ok", "gpus", "; ".join(gpus))


def engines(config: Config, there: Sequence[str]) -> Finding:
    """Judged as a launch does. `there`: the engines besides `hf` whose package is installed."""
    try:
        check_engine(config)
    except ConfigError as error:
        return Finding("fix", "engines", str(error))
    where = ", on nodes of the Ray cluster" if config.launch.backend == "ray" else ""
    text = f"{', '.join(['hf', *there])}; this configuration takes {config.actors.engine}{where}"
    return Finding("ok", "engines", text)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str] | None:
    """Name, driver and memory of each GPU; None without nvidia-smi."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return None
    query = [smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []


def _devices() -> int:
    import torch

    return torch.cuda.device_count()
