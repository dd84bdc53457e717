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

SMI_S = 20.0
ENGINES: Mapping[str, tuple[str, str]] = {
    "vllm": ("vllm", "pip install 'asyncrl[vllm]' (on a CPU: docs/how-to/engines.md)"),
    "vllm_server": ("httpx", "pip install 'asyncrl[vllm-server]'"),
    "sglang": ("httpx", "pip install 'asyncrl[sglang]'"),
}
"""By `actors.engine`: the module that it needs, and how to get it. `hf` needs what asyncrl needs anyway."""


def look(config: Config) -> Iterator[Finding]:
    yield python(sys.version_info[:3], sys.executable)
    torch, gpus = _version("torch"), _gpus()
    yield packages({name: _version(name) for name in ("torch", "transformers", "asyncrl")})
    yield from gpu(gpus, torch, _devices() if gpus and torch else 0)
    yield engines(
        config.actors.engine, [name for name, (module, _) in ENGINES.items() if importlib.util.find_spec(module)]
    )


def python(version: Sequence[int], executable: str) -> Finding:
    text = ".".join(map(str, version))
    if tuple(version) < (3, 11):
        return Finding("mend", "python", f"{text}: asyncrl needs 3.11 or newer; make an environment with one.")
    return Finding("ok", "python", f"{text}, {executable}")


def packages(versions: Mapping[str, str | None]) -> Finding:
    if missing := [name for name, version in versions.items() if version is None]:
        return Finding("mend", "packages", f"{', '.join(missing)} not installed: pip install asyncrl again.")
    return Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def gpu(gpus: Sequence[str] | None, torch: str | None, devices: int) -> Iterator[Finding]:
    """`gpus`: what nvidia-smi lists, None: it is not there. `devices`: how many of them torch sees."""
    if gpus is None:
        yield Finding("ok", "gpus", "none (no nvidia-smi): actors and learner run on the CPU")
    elif not gpus:
        yield Finding("mend", "gpus", "nvidia-smi is there and lists none: is the driver loaded, or a device given?")
    elif devices < len(gpus):
        build = "a CPU build" if torch and "+cpu" in torch else "for another version of CUDA, or some are hidden"
        text = f"{'; '.join(gpus)}: torch {torch} sees {devices} of {len(gpus)}; it is {build}. Install torch for CUDA."
        yield Finding("mend", "gpus", text)
    else:
        yield Finding("ok", "gpus", "; ".join(gpus))


def engines(chosen: str, there: Sequence[str]) -> Finding:
    if chosen in ENGINES and chosen not in there:
        module, remedy = ENGINES[chosen]
        text = f"actors.engine is {chosen}, and the package {module} is not installed: {remedy}."
        return Finding("mend", "engines", text)
    return Finding("ok", "engines", f"{', '.join(['hf', *there])}; this configuration takes {chosen}")


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
