"""Two hosts made of network namespaces, joined by one cable, each a Ray node. They share the machine's disk, as hosts
of a cluster share a folder, and nothing else: what goes from one to the other goes over that cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

NET = f"10.77.{os.getpid() % 250}"
PORT = 6399
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "120",
}


def why_not() -> str:
    """Empty: this user can make them."""
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is not installed"
    name = f"probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Hosts:
    def __init__(self) -> None:
        self.names = [f"asyncrl-{os.getpid()}-{side}" for side in "ab"]
        self.addresses = [f"{NET}.{i + 1}" for i in range(2)]
        self.folder = tempfile.mkdtemp(prefix="hosts-", dir="/tmp")
        a, b = self.names
        ends = [f"ar{os.getpid() % 100000}{side}" for side in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "netns", a, "type", "veth", "peer", "name", ends[1], "netns", b)
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._cable = ends[1]
        self._nodes: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"{self.addresses[0]}:{PORT}"

    def on(self, host: int, *command: str) -> list[str]:
        """The command line that runs `command` there."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def join(self, host: int, resource: str) -> None:
        """Makes the host a node of the cluster; host 0 is its head."""
        ray = str(Path(sys.executable).with_name("ray"))
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        words = [*(head if host == 0 else [f"--address={self.address}"]), f"--node-ip-address={self.addresses[host]}"]
        words += ["--num-cpus=8", "--block", "--object-store-memory=80000000", f'--resources={{"{resource}": 8}}']
        self._nodes.append(
            subprocess.Popen(
                self.on(host, ray, "start", *words), env=ENVIRONMENT, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", self._cable, "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", self._cable, "up")

    def pids(self, host: int) -> list[int]:
        said = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(word) for word in said.stdout.split()]

    def lose(self, host: int) -> None:
        """As when it is switched off."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for node in [node for node in self._nodes if node.poll() is None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(0.5)

    def close(self) -> None:
        for host, name in enumerate(self.names):
            self.lose(host)
            _ip("netns", "del", name)
        for node in self._nodes:
            node.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        yield hosts
    finally:
        hosts.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)
