"""Kept ids from an engine: asked for, gathered from truncated logits, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncrl.actors.engines.protocol import Engine, EngineDied, Generation, Sampling
from asyncrl.trajectory import Int32

if TYPE_CHECKING:
    import torch


async def generate(engine: Engine, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
    """`engine.generate`. Raises EngineDied for an engine that does not give the kept ids that `sampling` asks for."""
    generation = await engine.generate(request, prompt, sampling)
    if not sampling.max_kept:
        return generation
    if generation.kept is None:
        raise EngineDied(
            f"request {request}: actors.engine gave no kept ids (Generation.kept) under actors.top_p, top_k or min_p, "
            "over which the learner takes its logprobs. Use the engine hf or vllm; or set top_p 1, top_k 0 and min_p 0."
        )
    if problem := generation.kept.problem(generation.token_ids):
        raise EngineDied(f"request {request}: what actors.engine gave as kept ids {problem}")
    return generation


def kept_of(logits: torch.Tensor, max_kept: npt.NDArray[np.int64]) -> list[Int32 | None]:
    """The ids above minus infinity in each row of `logits` [B, V], ascending; none of them where there are more than
    `max_kept` [B], and None where that is 0."""
    import torch  # the endpoint for agents, which asks only, starts in a quarter of the time without it

    asked = np.flatnonzero(max_kept)
    found: list[Int32 | None] = [None] * len(max_kept)
    left = (logits if len(asked) == len(logits) else logits[torch.from_numpy(asked)]).isfinite()
    row, ids = (x.numpy() for x in left.nonzero(as_tuple=True))
    ends = np.searchsorted(row, np.arange(len(asked)), side="right")
    for at, begin, end in zip(asked.tolist(), [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        found[at] = ids[begin : end if end - begin <= max_kept[at] else begin].astype(np.int32)
    return found
