"""What every engine asks of a request before it takes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from asyncrl.actors.engines.protocol import PromptTooLong, Sampling
from asyncrl.trajectory import Int32


def prompt_of(
    request: str, prompt: Sequence[int], sampling: Sampling, *, vocab: int, room: int, running: Collection[str]
) -> Int32:
    """[T] the prompt's ids. `room`: tokens of a row, prompt and answer; `running`: the requests under way.

    Raises PromptTooLong, and ValueError for ids that the vocabulary does not have, for nothing to sample, and for a
    name that is taken.
    """
    ids = np.asarray(prompt, np.int32)
    # A negative id is a large one without its sign.
    if not len(ids) or ids.view(np.uint32).max() >= vocab:
        raise ValueError(f"request {request}: the prompt must hold token ids of 0..{vocab - 1} and not be empty")
    if len(ids) >= room:
        raise PromptTooLong(
            f"request {request}: the prompt has {len(ids)} tokens, a row has at most {room} with the answer "
            "(env.max_tokens): raise it or shorten the prompt"
        )
    if sampling.max_new_tokens < 1:
        raise ValueError(f"request {request}: max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
    if request in running:
        raise ValueError(f"request {request} is running already: names must be unique")
    return ids
