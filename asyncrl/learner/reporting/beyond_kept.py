"""Says once that many tokens carry no loss, because more ids were left for them than are recorded. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.trajectory import Trajectory

_MOST = 0.01
"""Share of a step's policy tokens that may be beyond `actors.max_kept` in silence."""


class BeyondKept:
    """Judges each training step until it has spoken."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept, self._said = max_kept, False

    def note(self, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> str:
        """The sentence, once; otherwise an empty text. `metrics` of the step on these trajectories."""
        beyond = metrics.get("correction/beyond_max_kept", 0.0)
        if self._said or not beyond:
            return ""
        tokens = sum(t.num_policy_tokens for t in trajectories)
        if beyond <= _MOST * tokens:
            return ""
        self._said = True
        return (
            f"{beyond:.0f} of the {tokens} policy tokens of this step ({beyond / tokens:.1%}) carry no loss: more ids "
            f"were left for them than actors.max_kept = {self._max_kept} records. Raise actors.max_kept, or lower "
            "actors.top_p or top_k; vLLM keeps more than top_k ids where logits are equal."
        )
