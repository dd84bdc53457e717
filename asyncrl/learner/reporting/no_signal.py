"""Says once that nothing can be learned, because rewards do not differ, and the most likely reason. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from asyncrl.trajectory import Trajectory

STEPS = 3
"""Training steps without a differing reward after which it is said."""
_MOST = 0.8


class NoSignal:
    """Judges the first training steps of this process; a reward that differs ends the judgement."""

    def __init__(self, steps: int) -> None:
        """`steps`: of the whole run, which may have fewer than `STEPS`."""
        self._left = max(1, min(STEPS, steps))
        self._seen: list[Trajectory] = []

    def note(self, trajectories: Sequence[Trajectory]) -> str:
        """The sentence, once; otherwise an empty text."""
        if not self._left:
            return ""
        self._left -= 1
        self._seen += trajectories
        kind = without_signal(self._seen)
        if not kind:
            self._left = 0
        sentence = f"{kind}. {likely_reason(self._seen)}" if kind and not self._left else ""
        if not self._left:
            self._seen = []
        return sentence


def without_signal(trajectories: Sequence[Trajectory]) -> str:
    """In which way the rewards do not differ; empty if they do."""
    rewards = {t.reward for t in trajectories}
    if len(rewards) == 1:
        return f"All {len(trajectories)} rewards so far are {rewards.pop():g}: there is nothing to learn from"
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for t in trajectories:
        by_group[t.id.group].append(t.reward)
    if all(len(group) > 1 and len(set(group)) == 1 for group in by_group.values()):
        return (
            f"The rewards within each of the {len(by_group)} groups so far are equal: estimators that compare the "
            "episodes of a group have nothing to learn from"
        )
    return ""


def likely_reason(trajectories: Sequence[Trajectory]) -> str:
    """The most likely reason, by what the trajectories show, and what to do."""
    count = len(trajectories)
    stops = Counter(t.stop_reason for t in trajectories)
    if stops["max_turns"] >= _MOST * count:
        return (
            f"Probably because {stops['max_turns']} of {count} episodes were ended by env.max_turns before they were "
            "scored: raise it, or let the environment give a reward when a message has `last`."
        )
    if (cut := stops["length"] + stops["max_tokens"]) >= _MOST * count:
        return (
            f"Probably because {cut} of {count} episodes were cut by actors.max_new_tokens or env.max_tokens before "
            "their end: raise these, or ask for shorter answers."
        )
    if sum(t.num_policy_tokens for t in trajectories) <= 2 * count:
        return (
            "Probably because the policy says nothing: its answers have at most 2 tokens on average. Check the chat "
            "template and actors.stop_token_ids."
        )
    if _all_alike(trajectories):
        return (
            "Probably because all episodes of a group are the same, token by token: the policy is certain of its "
            "answer. Use harder tasks, or raise actors.temperature."
        )
    rewards = {t.reward for t in trajectories}
    if rewards == {0.0}:
        return (
            "The episodes end by themselves, so probably the score accepts none: compare an answer with its "
            "ground_truth (asyncrl audit RUN --step 1), and whether the prompt asks for the form that the score reads; "
            "else the tasks are too hard for this model. See docs/how-to/reward-does-not-move.md."
        )
    if min(rewards) >= 1.0:
        return "Probably because the model solves these tasks already: use harder ones."
    return (
        "Probably because the score does not depend on the answer, or every task is always or never solved: look at "
        "the parts of the reward. See docs/how-to/reward-does-not-move.md."
    )


def _all_alike(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the sampled tokens are the same within every group of several."""
    sampled: defaultdict[int, set[bytes]] = defaultdict(set)
    sizes: Counter[int] = Counter()
    for t in trajectories:
        key = t.id.group
        sizes[key] += 1
        sampled[key].add(b"".join(row.token_ids[row.mask].tobytes() for row in t.rows))
    return max(sizes.values()) > 1 and all(len(distinct) == 1 for distinct in sampled.values())
