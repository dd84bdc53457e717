"""A turn of an episode, interrupted on one actor and resumed on another.

    actor stops ──abort──> the tokens sampled so far ──with the ticket──> buffer ──ticket──> another actor:
    renders the prompt again; if the ids are the same: prompt, tokens ──engine──> the rest of the turn

The tokens keep their logprobs and versions; the other actor samples the rest with the weights that it holds. Under
`buffer.turns` they travel as a recorded turn, whichever it is (recorded/samples.py), otherwise as the ticket's prefix:
those of the first turn only, since without durable turns an episode consists of its prompt and of what was sampled
behind it only until its environment is stepped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.actors.engines.kept import generate
from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.trajectory import Row


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


def of_prefix(prefix: Row | None, prompt: Sequence[int], sampling: Sampling) -> Generation | None:
    """The sampled tokens of a ticket's prefix; None if its prompt differs (the environment now resets to another), or
    if the turn cannot be continued."""
    if prefix is None:
        return None
    at = int(prefix.mask.argmax())
    if prefix.token_ids[:at].tolist() != list(prompt):
        return None
    begun = Generation(prefix.token_ids[at:], prefix.logprobs[at:], prefix.versions[at:], "abort", kept=prefix.kept)
    return begun if continues(begun, sampling) else None


def continues(begun: Generation, sampling: Sampling) -> bool:
    """Whether a turn that began so can be continued: not if it is complete (the limits have changed), or if it has kept
    ids and the rest will not, or the other way round, or more of them than are recorded now."""
    ids = begun.token_ids
    if len(ids) >= sampling.max_new_tokens or np.isin(ids, sampling.stop_token_ids).any():
        return False
    if (begun.kept is None) != (sampling.max_kept == 0):
        return False
    return begun.kept is None or bool(begun.kept.counts.max() <= sampling.max_kept)


def row_of(prompt: Sequence[int], generation: Generation) -> Row | None:
    """The prefix of an interrupted first turn; None where no token was sampled."""
    if not len(generation.token_ids):
        return None
    row = OpenRow(prompt)
    row.sampled(generation)
    return row.freeze()
