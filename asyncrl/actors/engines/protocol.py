"""What generates: token ids in; token ids, behaviour logprobs and a policy version per token out.

Requests keep running while weights change: `pause`, `load`, `resume` between two tokens. Text, messages and templates
never come this far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from asyncrl.errors import RunError
from asyncrl.trajectory import Float32, Int32

if TYPE_CHECKING:
    from asyncrl.weights.protocol import Weights


class PromptTooLong(ValueError):
    """The prompt leaves no room for one more token in a row of `env.max_tokens`."""


class WeightsMismatch(RunError):
    """Weights that do not fit the engine's model; nothing was changed and the engine still serves."""


class EngineDied(Exception):
    """The engine cannot generate any more; every request that was running ends with this. The actor ends with it and is
    started again."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled."""

    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    stop_token_ids: tuple[int, ...]
    """Generation ends with the first of these; it is part of the output."""
    seed: int
    """The k-th token depends on (seed, k) and the model alone, not on the requests beside it."""
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one request produced. The three arrays have the same length N >= 0."""

    token_ids: Int32
    """[N] the stop token included."""
    logprobs: Float32
    """[N] natural log of the probability with which the token was sampled, at the sampling temperature (at
    temperature 1 for greedy requests)."""
    versions: Int32
    """[N] policy version whose weights sampled the token."""
    stop_reason: Literal["stop", "length", "abort"]


class Engine(Protocol):
    """Many requests in flight, one event loop."""

    held: tuple[int, int]
    """(branch, version) of the weights in use."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Ends every running request with EngineDied. Harmless when repeated."""
        ...

    async def generate(self, request: str, prompt: Sequence[int], sampling: Sampling) -> Generation:
        """Sample after `prompt`. `request` is unique among those running.

        Raises PromptTooLong, and EngineDied. Cancelling the call frees what the request held.
        """
        ...

    async def abort(self, request: str) -> None:
        """Its `generate` returns what there is, with stop_reason `abort`. An unknown or finished request is ignored."""
        ...

    async def check(self, weights: Weights) -> None:
        """Whether `load` will take `weights`: everything that can be found out while the engine generates, so that the
        pause is shorter. Raises WeightsMismatch."""
        ...

    async def pause(self, recompute_kv: bool) -> None:
        """Returns when nothing is sampled any more. `recompute_kv`: whether a following `load` re-prefills running
        sequences under the new weights (every later logprob is exactly the new policy's) or keeps their KV."""
        ...

    async def load(self, weights: Weights) -> None:
        """Take over `weights`, in place, while paused. Raises WeightsMismatch before anything is changed, also without
        a `check` before."""
        ...

    async def resume(self) -> None: ...

    def load_stats(self) -> Mapping[str, float]:
        """`running`, `waiting` (requests), `kv_use` (share of 1), and totals since the start: `generated`, `prefilled`,
        `prefix_reused` (tokens), `paused_s` (seconds)."""
        ...
