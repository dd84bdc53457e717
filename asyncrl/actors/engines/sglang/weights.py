"""Transfers new weights to SGLang's servers: through a folder, through shared memory, or over a process group.

    disk     a Hugging Face folder, by its path                  servers anywhere that see `weights_dir`
    tensor   handles of tensors in this host's shared memory     servers on this host
    group    a torch.distributed broadcast from this process     servers anywhere; gloo on a CPU, nccl between GPUs

The last two use a session: begin, one request with all tensors, end.
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


class DiskCarrier:
    def __init__(self, model: Path) -> None:
        """`model`: the folder that the servers serve."""
        self._model = model

    async def start(self, servers: Servers) -> None:
        return None

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        await asyncio.to_thread(self._write, folder, tensors)
        # With flush_cache while requests keep their cache, SGLang updates the weights but answers 400.
        body = {"model_path": str(folder), "flush_cache": recompute_kv, "weight_version": version}
        await servers.command(lambda _: ("/update_weights_from_disk", body))

    def _write(self, folder: Path, tensors: Tensors) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        shutil.copyfile(self._model / "config.json", folder / "config.json")

    def close(self) -> None:
        return None


class TensorCarrier:
    """A handle can be read only once, so every server gets its own copies of the tensors."""

    async def start(self, servers: Servers) -> None:
        return None

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        handles = [await asyncio.to_thread(_handles, tensors) for _ in range(servers.count)]
        common = {"flush_cache": recompute_kv, "weight_version": version}

        def command(i: int) -> tuple[str, Any]:
            return "/update_weights_from_tensor", {"serialized_named_tensors": [handles[i][0]], **common}

        await _session(servers, lambda: servers.command(command))

    def close(self) -> None:
        return None


class GroupCarrier:
    """This process is rank 0; the servers, one rank each, follow in order."""

    def __init__(self, backend: str, address: str, timeout_s: float) -> None:
        """`address`: the address at which the servers reach this host."""
        self._backend, self._address, self._timeout = backend, address, timedelta(seconds=timeout_s)
        self._group: Any = None

    async def start(self, servers: Servers) -> None:
        port, size = free_port(), servers.count + 1

        def command(i: int) -> tuple[str, Any]:
            return "/init_weights_update_group", {
                "master_address": self._address, "master_port": port, "rank_offset": i + 1, "world_size": size,
                "group_name": GROUP, "backend": self._backend,
            }  # fmt: skip

        joined = asyncio.to_thread(_join, self._backend, self._address, port, size, self._timeout)
        self._group, _ = await asyncio.gather(joined, servers.command(command))

    async def load(self, servers: Servers, folder: Path, tensors: Tensors, version: str, recompute_kv: bool) -> None:
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": GROUP, "flush_cache": recompute_kv, "weight_version": version,
        }  # fmt: skip

        async def both() -> None:
            sent = asyncio.to_thread(_broadcast, self._group, self._backend, tensors)
            await asyncio.gather(sent, servers.command(lambda _: ("/update_weights_from_distributed", body)))

        await _session(servers, both)

    def close(self) -> None:
        if self._group is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._group)
            self._group = None


async def _session(servers: Servers, update: Callable[[], Awaitable[None]]) -> None:
    await servers.command(lambda _: ("/begin_weight_update", {}))
    await update()
    await servers.command(lambda _: ("/end_weight_update", {}))


def _handles(tensors: Tensors) -> tuple[str, list[Any]]:
    """(the handles, as SGLang's MultiprocessingSerializer reads them; the tensors, which must live until then)."""
    import torch
    import torch.multiprocessing  # registers how tensors are pickled

    sharing: Any = torch.multiprocessing
    before = sharing.get_sharing_strategy()
    # With file descriptors SGLang's server dies, because it lacks this process's authentication key.
    sharing.set_sharing_strategy("file_system")
    try:
        copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(copies)
    finally:
        sharing.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode(), copies


def _join(backend: str, address: str, port: int, size: int, timeout: timedelta) -> Any:
    """Join a group as sglang.srt.utils.init_custom_process_group does, without a default group."""
    from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    rendezvoused: Any = rendezvous(f"tcp://{address}:{port}", 0, size, timeout=timeout)
    store, _, _ = next(rendezvoused)
    prefixed = PrefixStore(GROUP, store)
    name = GroupName(GROUP)
    group, _ = _new_process_group_helper(size, 0, [], Backend(backend), prefixed, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def _broadcast(group: Any, backend: str, tensors: Tensors) -> None:
    import torch.distributed as dist

    for tensor in tensors.values():
        sent = tensor.cuda() if backend == "nccl" else tensor.contiguous()
        dist.broadcast(sent, src=0, group=group)


def own_address(url: str) -> str:
    """This host's address, as the server at `url` can reach it."""
    host, _, port = url.removeprefix("http://").removeprefix("https://").partition("/")[0].partition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port or 80)))  # sends nothing
        return str(probe.getsockname()[0])
