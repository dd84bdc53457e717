"""Weights from the learner's GPU into vLLM's workers, through vLLM's weight-transfer API.

    actor                                                worker (each of `tensor_parallel`)
    init_weight_transfer_engine ──where they meet──────> joins the learner's group       (nccl; cuda_ipc: nothing)
    start_weight_update ───────────────────────────────> vLLM prepares its layers
    (init_weight_transfer_engine) ──where they meet────> joins other engines' group      (nccl, if they are ready too)
    update_weights ──layout, checksums, handles────────> chunk by chunk: received, compared, loaded
    (asyncrl_received, update_weights) ────────────────> if that group failed: the other chunks by its own
    finish_weight_update ──────────────────────────────> vLLM finishes its layers
    asyncrl_synchronize ───────────────────────────────> the GPU has read all; then the learner gets its memory back

vLLM creates the transfer engine by the name of its backend (`weight_transfer_config`), which this module registers. In
0.32 that engine prepares and finishes the layers; in 0.24 the worker does, passes `load_weights` to it, and creates it
with other arguments. Both are supported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.actors.engines.protocol import EngineDied
from asyncrl.actors.engines.vllm.cpu_load import pack_tied_head
from asyncrl.errors import RunError
from asyncrl.weights.device.snapshot import SnapshotLayout
from asyncrl.weights.device.subscriber import chunks_of, join_group
from asyncrl.weights.local.file import checked_entries
from asyncrl.weights.protocol import WeightsCorrupt

if TYPE_CHECKING:
    from asyncrl.weights.device.process_group import ProcessGroup
    from asyncrl.weights.device.subscriber import LeasedWeights

log = logging.getLogger(__name__)

BACKEND = "asyncrl"
Command = Callable[[str, Awaitable[Any]], Awaitable[Any]]
Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


async def meet(llm: Any, weights: LeasedWeights, ranks: int, command: Command) -> None:
    """The `ranks` workers of `llm` join the learner's group, unless they are in it. They may generate meanwhile.
    `command(name, reply)` awaits a reply, with a deadline. Raises WeightsCorrupt when the learner does not answer."""
    if (meeting := await asyncio.to_thread(weights.group, ranks)) is not None:
        await command("init_weight_transfer_engine", llm.init_weight_transfer_engine(_request("Init", meeting)))


async def transfer(llm: Any, weights: LeasedWeights, command: Command) -> None:
    """Load `weights` into every worker of `llm`, which is paused.

    Raises WeightsCorrupt when the learner does not send; nothing was changed then. Raises EngineDied when the learner
    may have overwritten what was read, and when a command fails: the workers may hold parts of two versions and must
    not serve.
    """
    together = await asyncio.to_thread(weights.send)
    await command("start_weight_update", llm.start_weight_update())
    if together is None:
        await command("update_weights", llm.update_weights(_request("Update", weights.transfer())))
    else:
        await _receive_together(llm, weights, command, together)
    await command("finish_weight_update", llm.finish_weight_update())
    # The last chunks may still be read from the learner's memory, which it may write again once it is given back.
    await command("asyncrl_synchronize", llm.collective_rpc("asyncrl_synchronize"))
    try:
        await asyncio.to_thread(weights.settle)
    except WeightsCorrupt as error:
        raise EngineDied(f"the engine may hold parts of two versions and is restarted: {error}") from error


async def _receive_together(llm: Any, weights: LeasedWeights, command: Command, meeting: Mapping[str, Any]) -> None:
    """By the group of several engines; what did not arrive, by this engine's own."""
    if meeting["join"]:
        info = {name: meeting[name] for name in ("kind", "meet", "size", "wait_s", "first")}
        await command("init_weight_transfer_engine", llm.init_weight_transfer_engine(_request("Init", info)))
    info = weights.transfer()
    await command("update_weights", llm.update_weights(_request("Update", info | {"together": True})))
    if all(await command("asyncrl_received", llm.collective_rpc("asyncrl_received"))):
        return
    log.warning("the broadcast of %s to several engines failed, now to this one alone", weights.id)
    try:
        await asyncio.to_thread(weights.fall_back)
    except WeightsCorrupt as error:
        raise EngineDied(f"the engine may hold parts of two versions and is restarted: {error}") from error
    await command("update_weights", llm.update_weights(_request("Update", info | {"rest": True})))


def _request(kind: str, info: dict[str, Any]) -> Any:
    return getattr(base, f"WeightTransfer{kind}Request")(info)


@dataclass
class JoinInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """See Broadcast.join and Broadcast.send_together (weights/device/transports.py)."""

    kind: str
    meet: str
    size: int
    wait_s: float
    first: int = 0
    """Rank of this engine's first worker in a group of several engines; 0: a group of this engine alone."""


@dataclass
class ChunksInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """See LeasedWeights.transfer."""

    sizes: list[int]
    entries: list[Any]
    handles: list[dict[str, Any]] = field(default_factory=list)
    together: bool = False
    """From the group of several engines, which may fail."""
    rest: bool = False
    """Only the chunks that did not arrive from that group are loaded."""
    update_kind: ClassVar[str] = "dense"
    """Required by vLLM 0.24."""


class Transfer(base.WeightTransferEngine):  # type: ignore[misc]
    """The receiver in one worker."""

    init_info_cls, update_info_cls = JoinInfo, ChunksInfo

    def __init__(self, config: Any, *given: Any) -> None:
        """`given`: (vllm_config, device, model) in vLLM 0.32, (parallel_config, model) in 0.24."""
        super().__init__(config, *given)
        self._group: ProcessGroup | None = None
        self._together: ProcessGroup | None = None
        """The group of several engines."""
        self._loaded, self.received = 0, True
        """Chunks loaded in this update; whether they are all."""
        self._device = next(given[-1].parameters()).device

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Raises RunError, unless others are in the group too, without which this engine goes on."""
        meeting = {"kind": init_info.kind, "meet": init_info.meet, "size": init_info.size, "wait_s": init_info.wait_s}
        self._leave_together()
        if not init_info.first:
            self.shutdown()
            self._group = join_group(meeting, 1 + self.parallel_config.rank)
            return
        try:
            self._together = join_group(meeting, init_info.first + self.parallel_config.rank)
        except RunError as error:
            log.warning("a group of several engines: %s", error)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ChunksInfo, load_weights: Load | None = None) -> None:
        """Raises WeightsCorrupt for a chunk with a wrong checksum, before it is loaded. What a group of several engines
        does not bring is said by `received`."""
        load = load_weights or self.model.load_weights
        sizes = tuple(update_info.sizes)
        layout = SnapshotLayout(
            sizes, checked_entries(update_info.entries, sum(sizes), "the learner's layout", begin=0)
        )
        self._loaded, self.received = self._loaded if update_info.rest else 0, False
        group = self._together if update_info.together else self._group
        try:
            for index, chunk in enumerate(chunks_of(update_info.handles, layout, group, self._device)):
                if index == self._loaded:
                    load(layout.views(index, chunk))
                    self._loaded += 1
            self.received = True
        except RunError as error:
            if not update_info.together:
                raise
            log.warning("a group of several engines: %s", error)
            self._leave_together()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Called by vLLM 0.32, whose own method waits for an accelerator even where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_head(self.model, self.model_config)

    def shutdown(self) -> None:
        self._leave_together()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _leave_together(self) -> None:
        if self._together is not None:
            self._together.close()
            self._together = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Required by vLLM 0.24; asyncrl's learner does not send through it."""
        raise TypeError("asyncrl's learner sends weights by itself: asyncrl/weights/device/publisher.py")


WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
