"""The interface of engines: token ids in; token ids, behaviour logprobs and a policy version per token out.

Requests keep running while weights change: `pause`, `load`, `resume` between two tokens. Engines see no text, messages
or templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from asyncrl.errors import RunError
from asyncrl.trajectory import Float32, Int32
from asyncrl.trajectory.kept_ids import KeptIds, joined

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Weights


class PromptTooLong(ValueError):
    """The prompt leaves no room for one more token in a row of `env.max_tokens`."""


class WeightsMismatch(RunError):
    """The weights do not fit the engine's model; nothing was changed and the engine still serves."""


class EngineDied(Exception):
    """The engine cannot generate any more. Every running request fails with this; the actor ends, and is restarted."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request."""

    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    """Generation ends with the first of these; it is part of the output."""
    seed: int
    """The k-th token depends on (seed, k) and the model alone, not on concurrent requests."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability, after `top_k` and `min_p`; 1: off."""
    top_k: int = 0
    """Only so many of the most probable tokens; 0: off."""
    min_p: float = 0.0
    """Only tokens of at least this share of the largest probability; 0: off."""
    max_kept: int = 0
    """Most ids to return for each token of those left by truncation (`kept`); 0: none. Set if truncated samples are
    trained on."""

    @property
    def truncated(self) -> bool:
        """Whether fewer tokens than the vocabulary holds can be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The output of one request. The first three arrays have the same length N >= 0."""

    token_ids: Int32
    """[N] including the stop token."""
    logprobs: Float32
    """[N] natural log of the probability with which the token was sampled, at the sampling temperature (at
    temperature 1 for greedy requests); under truncated sampling, of its probability among the kept ids."""
    versions: Int32
    """[N] the policy version that sampled each token."""
    stop_reason: Literal["stop", "length", "abort"]
    queue_s: float | None = None
    """Seconds from the request to its first token; None where there is none."""
    prefilled: int | None = None
    """Tokens computed before sampling, again after new weights included; None where the engine does not count them."""
    kept: KeptIds | None = None
    """Kept ids of the N tokens, where `Sampling.max_kept` asks for them."""

    def first(self, n: int) -> Generation:
        """The first n tokens, without `queue_s` and `prefilled`."""
        kept = None if self.kept is None else self.kept.first(n)
        return Generation(self.token_ids[:n], self.logprobs[:n], self.versions[:n], self.stop_reason, kept=kept)

    def after(self, begun: Generation) -> Generation:
        """The tokens of `begun`, and behind them these. Both have kept ids, or neither."""
        kept = None if self.kept is None or begun.kept is None else joined((begun.kept, self.kept))
        return replace(
            self,
            token_ids=np.concatenate((begun.token_ids, self.token_ids)),
            logprobs=np.concatenate((begun.logprobs, self.logprobs)),
            versions=np.concatenate((begun.versions, self.versions)),
            kept=kept,
        )


class Engine(Protocol):
    """Serves many concurrent requests on one event loop."""

    held_version: tuple[int, int]
    """(branch, version) of the weights in use."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End every running request with EngineDied. May be called again."""
        ...

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        """Sample after `prompt`. `request` is unique among those running.

        Raises PromptTooLong, and EngineDied. Cancelling the call frees what the request held.
        """
        ...

    async def abort(self, request: str) -> None:
        """Make `generate` return the tokens so far, with stop_reason `abort`. Ignores unknown or finished ones."""
        ...

    async def check(self, weights: Weights) -> None:
        """Check `weights` as far as possible while the engine generates, so that the pause is shorter. Raises
        WeightsMismatch."""
        ...

    async def pause(self, recompute_kv: bool) -> None:
        """Stop sampling; returns when it has stopped. `recompute_kv`: the next `load` re-prefills running sequences
        with the new weights, so that every later logprob is exactly the new policy's; else it keeps their KV."""
        ...

    async def load(self, weights: Weights) -> None:
        """Load `weights`, in place, while paused. Raises WeightsMismatch before anything is changed, even without an
        earlier `check`."""
        ...

    async def resume(self) -> None: ...

    def load_stats(self) -> Mapping[str, float]:
        """`running`, `waiting` (requests), `kv_use` (share of 1), and totals since the start: `generated`, `prefilled`,
        `prefix_reused` (tokens), `paused_s` (seconds), `preempted` (requests; optional)."""
        ...
