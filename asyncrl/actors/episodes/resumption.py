"""The first turn of an episode, interrupted on one actor and resumed on another.

    actor stops ──abort──> the sampled tokens, as a prefix ──with the ticket──> buffer ──ticket──> another actor:
    renders the prompt again; if the ids are the same: prompt, prefix ──engine──> the rest of the turn

Until its environment is stepped, an episode consists of its prompt and the tokens sampled after it. These keep their
logprobs and versions; the other actor samples the rest with the weights that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.actors.engines.kept import generate
from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.trajectory import Row


class Interrupted(Exception):
    """The episode ended in its first turn because its actor stops."""


async def first_turn(
    engine: Engine, request: str, prompt: Sequence[int], sampling: Sampling, prefix: Row | None, progress: Progress
) -> Generation:
    """Like `engine.generate`, but continues the ticket's `prefix` if it fits; the result includes it.

    Raises Interrupted when the request is aborted and `progress.interrupted`; `progress.prefix` then holds the tokens.
    """
    begun = _usable(prefix, prompt, sampling)
    if begun is not None:
        sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(begun.token_ids))
    progress.interruptible = request
    try:
        ids = prompt if begun is None else [*prompt, *begun.token_ids.tolist()]
        generation = await generate(engine, request, ids, sampling)
    finally:
        progress.interruptible = ""
    if begun is not None:
        progress.prefix_tokens = len(begun.token_ids)
        generation = generation.after(begun)
    if generation.stop_reason == "abort" and progress.interrupted:
        progress.prefix = _row(prompt, generation)
        raise Interrupted
    return generation


def _usable(prefix: Row | None, prompt: Sequence[int], sampling: Sampling) -> Generation | None:
    """The sampled tokens of `prefix`; None if its prompt differs (the environment now resets to another), or if they
    already complete the turn (the limits have changed), or if they have kept ids and the rest will not, or the other
    way round, or more of them than are recorded now."""
    if prefix is None:
        return None
    at = int(prefix.mask.argmax())
    ids = prefix.token_ids[at:]
    if prefix.token_ids[:at].tolist() != list(prompt) or len(ids) >= sampling.max_new_tokens:
        return None
    if np.isin(ids, sampling.stop_token_ids).any() or (prefix.kept is None) != (sampling.max_kept == 0):
        return None
    if prefix.kept is not None and prefix.kept.counts.max() > sampling.max_kept:
        return None
    return Generation(ids, prefix.logprobs[at:], prefix.versions[at:], "abort", kept=prefix.kept)


def _row(prompt: Sequence[int], generation: Generation) -> Row | None:
    if not len(generation.token_ids):
        return None
    row = OpenRow(prompt)
    row.sampled(generation)
    return row.freeze()
