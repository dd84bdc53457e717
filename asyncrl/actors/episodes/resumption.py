"""A turn of an episode, interrupted on one actor and resumed on another.

    actor stops ──abort──> the tokens sampled so far ──with the ticket──> buffer ──ticket──> another actor:
    renders the prompt again; if the ids are the same: prompt, tokens ──engine──> the rest of the turn

The tokens keep their logprobs and versions; the other actor samples the rest with the weights that it holds. They
travel as a recorded turn (`buffer.turns`, recorded/samples.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.actors.engines.kept import generate
from asyncrl.actors.engines.protocol import Engine, Generation, Sampling


class Interrupted(Exception):
    """The episode ended in a turn because its actor stops; its ticket is released."""


async def resumed(
    engine: Engine, request: str, prompt: Sequence[int], sampling: Sampling, begun: Generation | None
) -> Generation:
    """Like `engine.generate`, but continues `begun`; the result includes it."""
    if begun is None:
        return await generate(engine, request, prompt, sampling)
    sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(begun.token_ids))
    return (await generate(engine, request, [*prompt, *begun.token_ids.tolist()], sampling)).after(begun)


def continues(begun: Generation, sampling: Sampling) -> bool:
    """Whether a turn that began so can be continued: not if it is complete (the limits have changed), or if it has kept
    ids and the rest will not, or the other way round, or more of them than are recorded now."""
    ids = begun.token_ids
    if len(ids) >= sampling.max_new_tokens or np.isin(ids, sampling.stop_token_ids).any():
        return False
    if (begun.kept is None) != (sampling.max_kept == 0):
        return False
    return begun.kept is None or bool(begun.kept.counts.max() <= sampling.max_kept)
