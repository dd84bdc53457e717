"""Several Ray nodes on this machine, on its loopback, and none of them left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"


class Nodes:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.folder = tempfile.mkdtemp(prefix="nodes-", dir="/tmp")
        # Ray notes a cluster's address for `ray.init()` in a folder that it does not make, RAY_TMPDIR/ray or /tmp/ray,
        # and removes the note at the end. With a folder of its own nothing has to be there before, and the note of a
        # cluster that somebody runs on this machine stays.
        self._ray_tmpdir = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self.folder
        os.mkdir(os.path.join(self.folder, "ray"))
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        self.head: Any = None
        self._hosts = 1
        self._cluster = Cluster()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, **resources: float) -> Any:
        """A node with 8 CPUs and these resources; the first one is the head, which is no place for a role."""
        first = self.head is None
        # Not .1, which Ray replaces by this machine's own address.
        self._hosts += 1
        node = self._cluster.add_node(
            num_cpus=0 if first else 8, resources=resources, include_dashboard=False,
            node_ip_address=f"127.0.0.{self._hosts}",
            object_store_memory=80 << 20, **({"temp_dir": self.folder} if first else {}),
        )  # fmt: skip
        if first:
            self.head = node
        return node

    def lose(self, node: Any) -> None:
        """As when a machine is switched off."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> list[str]:
        """What had to be killed after all."""
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        mine = [p for p in psutil.Process().children(recursive=True) if p.pid not in self._before]
        _, left = psutil.wait_procs(mine, timeout=10)
        names = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(process.cmdline())[:200])
                process.kill()
        if self._ray_tmpdir is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = self._ray_tmpdir
        shutil.rmtree(self.folder, ignore_errors=True)
        return names


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.add()
        yield nodes
    finally:
        nodes.close()
