"""How new weights reach SGLang's servers: through a folder, through shared memory, or over a process group.

    disk     a Hugging Face folder, by its path                  servers anywhere that see `weights_dir`
    tensor   handles of tensors in this host's shared memory     servers on this host
    group    a broadcast of torch.distributed from this process  servers anywhere; gloo on a CPU, nccl between GPUs

The last two happen within a session: begin, one request with all tensors, end.
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from asyncrl.actors.engines.servers.dialect import Tensors
from asyncrl.actors.engines.servers.http import Servers
from asyncrl.actors.engines.servers.process import free_port

GROUP = "asyncrl"


class Disk:
    def __init__(self, model: Path) -> None:
        """`model`: the folder that the servers serve."""
        self._model = model

    async def start(self, servers: Servers) -> None:
        return None

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        await asyncio.to_thread(self._write, folder, tensors)
        # Asked to flush the cache of requests that keep theirs, SGLang answers 400, though the weights are updated.
        body = {"model_path": str(folder), "flush_cache": recompute_kv, "weight_version": version}
        await servers.tell(lambda _: ("/update_weights_from_disk", body))

    def _write(self, folder: Path, tensors: Tensors) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        shutil.copyfile(self._model / "config.json", folder / "config.json")

    def close(self) -> None:
        return None


class Handles:
    """Handles are good for one reading each, so every server gets tensors of its own."""

    async def start(self, servers: Servers) -> None:
        return None

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        handles = [await asyncio.to_thread(_handles, tensors) for _ in range(servers.count)]
        common = {"flush_cache": recompute_kv, "weight_version": version}

        def phrase(i: int) -> tuple[str, Any]:
            return "/update_weights_from_tensor", {"serialized_named_tensors": [handles[i][0]], **common}

        await _session(servers, lambda: servers.tell(phrase))

    def close(self) -> None:
        return None


class Group:
    """This process is rank 0; the servers, of one rank each, follow in order."""

    def __init__(self, backend: str, address: str, timeout_s: float) -> None:
        """`address`: of this host, by which the servers reach it."""
        self._backend, self._address, self._timeout = backend, address, timedelta(seconds=timeout_s)
        self._group: Any = None

    async def start(self, servers: Servers) -> None:
        port, size = free_port(), servers.count + 1

        def phrase(i: int) -> tuple[str, Any]:
            return "/init_weights_update_group", {
                "master_address": self._address, "master_port": port, "rank_offset": i + 1, "world_size": size,
                "group_name": GROUP, "backend": self._backend,
            }  # fmt: skip

        joined = asyncio.to_thread(_join, self._backend, self._address, port, size, self._timeout)
        self._group, _ = await asyncio.gather(joined, servers.tell(phrase))

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": GROUP, "flush_cache": recompute_kv, "weight_version": version,
        }  # fmt: skip

        async def both() -> None:
            sent = asyncio.to_thread(_broadcast, self._group, self._backend, tensors)
            await asyncio.gather(sent, servers.tell(lambda _: ("/update_weights_from_distributed", body)))

        await _session(servers, both)

    def close(self) -> None:
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)
            self._group = None


async def _session(servers: Servers, update: Callable[[], Awaitable[None]]) -> None:
    await servers.tell(lambda _: ("/begin_weight_update", {}))
    await update()
    await servers.tell(lambda _: ("/end_weight_update", {}))


def _handles(tensors: Tensors) -> tuple[str, list[Any]]:
    """What SGLang's MultiprocessingSerializer reads; and the tensors, which must live until it has."""
    import torch
    import torch.multiprocessing  # registers how tensors are pickled

    sharing: Any = torch.multiprocessing
    before = sharing.get_sharing_strategy()
    # With file descriptors SGLang's server dies: it has not this process's authentication key.
    sharing.set_sharing_strategy("file_system")
    try:
        copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
        said = io.BytesIO()
        ForkingPickler(said).dump(copies)
    finally:
        sharing.set_sharing_strategy(before)
    return base64.b64encode(said.getvalue()).decode(), copies


def _join(backend: str, address: str, port: int, size: int, timeout: timedelta) -> Any:
    """As sglang.srt.utils.init_custom_process_group does it: a group beside the default one, which may not exist."""
    from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    met: Any = rendezvous(f"tcp://{address}:{port}", 0, size, timeout=timeout)
    store, _, _ = next(met)
    prefixed = PrefixStore(GROUP, store)
    name = GroupName(GROUP)
    group, _ = _new_process_group_helper(size, 0, [], Backend(backend), prefixed, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _broadcast(group: Any, backend: str, tensors: Tensors) -> None:
    import torch.distributed as dist

    for tensor in tensors.values():
        given = tensor.cuda() if backend == "nccl" else tensor.contiguous()
        dist.broadcast(given, src=0, group=group)


def own_address(url: str) -> str:
    """Of this host, as the server at `url` can reach it."""
    host, _, port = url.removeprefix("http://").removeprefix("https://").partition("/")[0].partition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port or 80)))  # sends nothing
        return str(probe.getsockname()[0])
