"""What a few episodes say about a training run with the same configuration: pure functions of the episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.trajectory import StopReason
from asyncrl.trial.tried import Tried

Group = Sequence[Tried | str]
"""The episodes of one task; a text says why an episode failed."""
LOST = "another episode of its group failed, and env.group_score compares whole groups"
"""Why an episode was given up that did not fail itself."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the episodes, from the config."""

    max_turns: int
    max_tokens: int
    max_new_tokens: int
    tool_calls: str


_CUT: Mapping[StopReason, str] = {
    "max_turns": "env.max_turns ({limits.max_turns}): what they did until then is scored; raise it if the task needs "
    "more turns",
    "max_tokens": "env.max_tokens ({limits.max_tokens}), the tokens of a row: raise it, up to the model's positions, "
    "or make prompts and tool results shorter",
    "length": "actors.max_new_tokens ({limits.max_new_tokens}), the tokens of a turn: raise it, or ask for shorter "
    "answers",
}


def findings(groups: Sequence[Group], limits: Limits, unstable: Sequence[str] = ()) -> list[str]:
    """One sentence for each thing that would go wrong in training. `unstable`: the situations in which the chat
    template changes earlier tokens."""
    played = [each for group in groups for each in group if isinstance(each, Tried)]
    return [
        *_failures(groups),
        *_equal_rewards(groups, played),
        *_cut(played, limits),
        *_unread_calls(played, limits),
        *_breaks(played, unstable),
    ]


def _failures(groups: Sequence[Group]) -> Iterator[str]:
    reasons = Counter(each for group in groups for each in group if isinstance(each, str))
    if reasons:
        total = sum(map(len, groups))
        # The reason LOST has another reason behind it.
        why, count = next((each for each in reasons.most_common() if each[0] != LOST), (LOST, reasons.total()))
        kinds = f", {count} of them like this" if len(reasons) > 1 else ""
        yield (
            f"{reasons.total()} of {total} episodes failed{kinds}: {why.rstrip('.')}. A run tries an episode again "
            "(env.retries); then its group is dropped (env_error)."
        )


def _equal_rewards(groups: Sequence[Group], played: Sequence[Tried]) -> Iterator[str]:
    """A group whose rewards are equal has no advantage under any estimator that compares its episodes."""
    rewards = {each.reward for each in played}
    if len(played) > 1 and len(rewards) == 1:
        yield (
            f"all {len(played)} rewards are {rewards.pop():g}: a group of equal rewards has no advantage, so nothing "
            f"would be learned. {_likely(played)}"
        )
        return
    of_groups = [[each.reward for each in group if isinstance(each, Tried)] for group in groups]
    several = [own for own in of_groups if len(own) > 1]
    equal = sum(len(set(own)) == 1 for own in several)
    if several and 2 * equal > len(several):
        yield (
            f"{equal} of {len(several)} groups have equal rewards and so no advantage: training would use the other "
            "groups only. Use tasks that the model solves sometimes, a score with more steps, or larger groups "
            "(learner.group_size)."
        )


def _likely(played: Sequence[Tried]) -> str:
    """The most likely reason for equal rewards, from what the episodes show."""
    if played[0].reward > 0 and all(each.stop_reason == "done" for each in played):
        return "The model solves these tasks already: give it harder ones."
    if not any(turn.content.strip() or turn.calls for each in played for turn in each.turns):
        return "The model said nothing: is its chat template, or its eos token (actors.stop_token_ids), the right one?"
    if all(each.stop_reason != "done" for each in played):
        return "No episode ended by itself; each was cut by a limit (below)."
    return (
        "Compare what the model said (above) with what the score expects: the format of the answer, or a task that is "
        "too hard for this model."
    )


def _cut(played: Sequence[Tried], limits: Limits) -> Iterator[str]:
    for reason, text in _CUT.items():
        if count := sum(each.stop_reason == reason for each in played):
            yield f"{count} of {len(played)} episodes were cut by {text.format(limits=limits)}."


def _unread_calls(played: Sequence[Tried], limits: Limits) -> Iterator[str]:
    calls = [name for each in played for piece in each.turns for name, _ in piece.calls]
    if unread := sum(not name for name in calls):
        yield (
            f"{unread} of {len(calls)} tool calls could not be parsed as actors.tool_calls {limits.tool_calls}: is "
            "this how the model writes them?"
        )


def _breaks(played: Sequence[Tried], unstable: Sequence[str]) -> Iterator[str]:
    broken = [each.prefix_breaks for each in played if each.prefix_breaks]
    if broken:
        where = f" (this template does so at: {', '.join(unstable)})" if unstable else ""
        yield (
            f"{len(broken)} of {len(played)} episodes became several rows, {sum(broken)} times in all, because the "
            f"chat template changed earlier tokens{where}: each such row costs the whole conversation again."
        )
