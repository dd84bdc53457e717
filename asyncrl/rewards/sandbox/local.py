"""SandboxFusion's contract without a service: runs untrusted code on this machine, isolated by `jail.py`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import IO, Any, Literal

from asyncrl.rewards.sandbox.contract import Ran, Result, Run
from asyncrl.rewards.sandbox.syscalls import program

GRACE_S = 20.0
"""Seconds for starting and ending a jail on a busy machine; past it the jail is killed from outside."""
_OUTPUT_CHARS = 1 << 20
"""Largest size of stdout and of stderr."""
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime",
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
)  # fmt: skip


class LocalSandbox:
    """Runs python and bash. Under `isolation: full` the code has no network, sees no file but programs and its own, and
    no process but its own; in any case the limits apply, and it is killed with all its children."""

    def __init__(
        self,
        *,
        isolation: Literal["full", "process"] = "full",
        concurrency: int | None = None,
        memory_mb: int = 512,
        disk_mb: int = 64,
        file_mb: int = 16,
        processes: int = 32,
        open_files: int = 64,
    ) -> None:
        """
        Args:
            isolation: full needs namespaces: root, or a kernel that gives them to everybody. process: rlimits and
                killing only, for machines that refuse them: network and readable files stay open to the code.
            concurrency: runs at the same time; None: one per core.
            memory_mb: of all its processes together, with what they share; each may map twice that. Memory that could
                not be counted is refused: SysV segments, queues and semaphores, memfds, anonymous shared mappings.
            disk_mb: of all its files together (isolation full), held in memory.
            file_mb: of one file; of stdout and stderr too.
            processes: at the same time.
            open_files: of one process.
        """
        self._isolation = isolation
        self._limits = {
            "memory_mb": memory_mb, "disk_mb": disk_mb, "file_mb": file_mb, "processes": processes,
            "open_files": open_files,
        }  # fmt: skip
        self._concurrency = concurrency or os.cpu_count() or 1
        self._slots: tuple[asyncio.AbstractEventLoop | None, asyncio.Semaphore] = (None, asyncio.Semaphore())

    async def run(self, run: Run) -> Result:
        loop = asyncio.get_running_loop()
        if self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        async with self._slots[1]:
            return await asyncio.to_thread(self.run_now, run)

    def run_now(self, run: Run) -> Result:
        """Run the code in the calling thread."""
        if sys.platform != "linux":
            return Result("SandboxError", "the local sandbox needs Linux; give the url of a SandboxFusion service")
        if run.language not in LANGUAGES:
            return Result(
                "SandboxError", f"language {run.language!r}: the local sandbox has {', '.join(sorted(LANGUAGES))}"
            )
        try:
            filter = program(os.uname().machine)
        except ValueError as error:
            return Result("SandboxError", f"{error}; give the url of a SandboxFusion service")
        file_name, command = LANGUAGES[run.language]
        files = {**run.files, file_name: run.code.encode()}
        limits = dict(self._limits)
        if run.memory_limit_mb > 0:
            limits["memory_mb"] = min(limits["memory_mb"], run.memory_limit_mb)
        with tempfile.TemporaryDirectory(prefix="asyncrl-sandbox-") as folder:
            plan = {
                **limits,
                "parent": os.getpid(),
                "isolation": self._isolation,
                "folder": folder,
                "visible": _visible(),
                "command": command,
                "environment": _environment("/sandbox" if self._isolation == "full" else folder),
                "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
                "fetch_files": list(run.fetch_files),
                "timeout": run.run_timeout,
                "filter": base64.b64encode(filter).decode(),
                "shared_folders": ["/dev/shm", "/tmp", "/var/tmp"],
            }
            return _jailed(plan, run.stdin)


def _jailed(plan: dict[str, Any], stdin: str) -> Result:
    with _memory(json.dumps(plan)) as planned, _memory() as report, _memory(stdin) as given, _memory() as out, \
            _memory() as err:  # fmt: skip
        # In memory instead of pipes: nobody has to read meanwhile, and the limit for files bounds the output.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("jail.py")), str(planned.fileno()),
             str(report.fileno())],
            stdin=given, stdout=out, stderr=err, pass_fds=[planned.fileno(), report.fileno()], start_new_session=True,
            env={},
        )  # fmt: skip
        try:
            process.wait(plan["timeout"] + GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # init dies with it, and the rest with init
            process.wait()
            return Result("SandboxError", f"the jail did not end within {plan['timeout'] + GRACE_S} s")
        output, stdout, stderr = (_read(file) for file in (report, out, err))
    if not output:
        return Result("SandboxError", f"the jail died (exit code {process.returncode}): {stderr[-500:]}")
    report_of: dict[str, Any] = json.loads(output)
    if error := report_of.get("error"):
        remedy = (
            "as root the code runs as another user, who must be able to read this Python"
            if "could not be started" in error
            else "isolation: full needs root or unprivileged user namespaces; isolation: process does without, or give "
            "the url of a SandboxFusion service"
        )
        return Result("SandboxError", f"the jail failed: {error} ({remedy})")
    return _result(plan, report_of, stdout, stderr)


def _result(plan: dict[str, Any], report: dict[str, Any], stdout: str, stderr: str) -> Result:
    files = {name: base64.b64decode(data) for name, data in report["files"].items()}
    why, code = report["why"], report["return_code"]
    message = {
        "": "" if code == 0 else f"exit code {code}",
        "time": f"killed after {plan['timeout']} s",
        "memory": f"killed: more than {plan['memory_mb']} MB of memory",
    }[why]
    ran = Ran("TimeLimitExceeded" if why == "time" else "Finished", code, stdout, stderr, report["seconds"])
    return Result("Success" if code == 0 and not why else "Failed", message, ran, files=files)


def _memory(text: str = "") -> IO[bytes]:
    file = os.fdopen(os.memfd_create("asyncrl-sandbox"), "w+b")
    file.write(text.encode())
    file.flush()
    file.seek(0)
    return file


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_OUTPUT_CHARS).decode(errors="replace")


def _visible() -> list[str]:
    """Folders of programs and libraries, of Python and of this environment; parents before their contents."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib")}
    return [*_SYSTEM, *sorted(path for path in own if path and path != "/")]


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }


LANGUAGES: dict[str, tuple[str, list[str]]] = {
    "python": ("main.py", [sys.executable, "main.py"]),
    "bash": ("main.sh", ["/bin/bash", "main.sh"]),
}
"""By language: the file that the code is written to, and the command."""
