"""An episode's first turn, interrupted by one actor and gone on with by another.

    actor told to stop ──abort──> what was sampled, as a prefix ──with the ticket──> buffer ──ticket──> another actor:
    the prompt rendered again, the same ids? then: prompt, prefix ──engine──> the rest of the turn

Until its environment is stepped an episode is nothing but a prompt and what was sampled behind it. Tokens keep the
logprobs and versions that they were sampled with; the rest is sampled by the weights that the other actor holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.actors.engines.protocol import Engine, Generation, Sampling
from asyncrl.actors.episodes.progress import Progress
from asyncrl.actors.episodes.rows import OpenRow
from asyncrl.trajectory import Row


class Interrupted(Exception):
    """The episode ended in its first turn because its actor leaves."""


async def first_turn(
    engine: Engine, request: str, prompt: Sequence[int], sampling: Sampling, prefix: Row | None, progress: Progress
) -> Generation:
    """As `engine.generate`, behind the ticket's `prefix` where that fits, which is part of what is returned.

    Raises Interrupted when the request is aborted and `progress.interrupted`; what was sampled is `progress.prefix`.
    """
    begun = _begun(prefix, prompt, sampling)
    if begun is None:
        asked, left = prompt, sampling
    else:
        asked = [*prompt, *begun.token_ids.tolist()]
        left = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(begun.token_ids))
    progress.interruptible = request
    try:
        said = await engine.generate(request, asked, left)
    finally:
        progress.interruptible = ""
    if begun is not None:
        progress.prefix_tokens = len(begun.token_ids)
        said = Generation(
            np.concatenate((begun.token_ids, said.token_ids)),
            np.concatenate((begun.logprobs, said.logprobs)),
            np.concatenate((begun.versions, said.versions)),
            said.stop_reason,
        )
    if said.stop_reason == "abort" and progress.interrupted:
        progress.prefix = _row(prompt, said)
        raise Interrupted
    return said


def _begun(prefix: Row | None, prompt: Sequence[int], sampling: Sampling) -> Generation | None:
    """What was sampled of the turn before. None for another prompt (the environment resets to something else now), and
    where it would be over by now (the run has other limits)."""
    if prefix is None:
        return None
    at = int(prefix.mask.argmax())
    ids = prefix.token_ids[at:]
    if prefix.token_ids[:at].tolist() != list(prompt) or len(ids) >= sampling.max_new_tokens:
        return None
    if np.isin(ids, sampling.stop_token_ids).any():
        return None
    return Generation(ids, prefix.logprobs[at:], prefix.versions[at:], "abort")


def _row(prompt: Sequence[int], said: Generation) -> Row | None:
    if not len(said.token_ids):
        return None
    row = OpenRow(prompt)
    row.sampled(said)
    return row.freeze()
