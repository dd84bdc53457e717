"""The words of `asyncrl try`: an episode as lines, and a summary of all."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.trial.tried import Piece, Tried

MAX_CHARS = 1500
"""A longer piece of context is shown without its middle."""
_MARGIN = 9


def episode_line(number: int, of: int, episode: Tried | str) -> str:
    """One episode in one line."""
    if isinstance(episode, str):
        return f"episode {number} of {of}: failed: {episode}"
    sampled = [turn.tokens for turn in episode.turns if turn.tokens is not None]
    tokens = f"{sum(sampled)} tokens sampled, " if sampled else ""
    return (
        f"episode {number} of {of}: reward {episode.reward:g}{_parts(episode.rewards)}, {episode.stop_reason}, "
        f"{_count(episode.turn_count, 'turn')}, {tokens}{episode.seconds:.2f} s"
    )


def conversation(episode: Tried) -> Iterator[str]:
    """The conversation, piece by piece, with the tool calls and the cost of each turn."""
    turn = 0
    for piece in episode.pieces:
        turn += piece.policy
        yield from _lines(f"{episode.said} {turn}" if piece.policy else piece.speaker, shortened(piece.text))
        for name, arguments in piece.calls:
            yield from _lines(
                "", f"-> calls {name} {arguments}" if name else f"-> a call that is not read: {arguments}"
            )
        if piece.policy and (cost := _cost(piece)):
            yield from _lines("", f"-> {cost}")
    if episode.metrics:
        yield f"  metrics: {', '.join(f'{name} {value:g}' for name, value in sorted(episode.metrics.items()))}"


def summary(played: Sequence[Tried], failed: int, tasks: int, seconds: float) -> Iterator[str]:
    """What all episodes have in common, as lines."""
    counts = f"{_count(tasks, 'task')}, {_count(len(played) + failed, 'episode')} in {seconds:.1f} s"
    yield f"{counts}{f', {failed} failed' if failed else ''}"
    if not played:
        return
    yield f"  reward   {_spread([each.reward for each in played])}"
    for name in sorted({name for each in played for name in each.rewards}):
        yield f"           {name}: {_spread([each.rewards[name] for each in played if name in each.rewards])}"
    turns = [turn for each in played for turn in each.turns]
    yield f"  turns    {sum(each.turn_count for each in played) / len(played):.1f} an episode"
    yield from _costs(turns, max((each.said for each in played), key=len))
    ends = Counter(each.stop_reason for each in played)
    yield f"  ended    {', '.join(f'{reason} {count}' for reason, count in ends.most_common())}"


def _costs(turns: Sequence[Piece], each: str) -> Iterator[str]:
    """Tokens and seconds of `each` turn or choice, where they are known."""
    if sampled := [turn.tokens for turn in turns if turn.tokens is not None]:
        yield f"  tokens   {statistics.fmean(sampled):.1f} sampled a {each}, at most {max(sampled)}"
    if records := [turn.record for turn in turns if turn.record]:
        generating = statistics.fmean(record.generate for record in records)
        waiting = statistics.fmean(record.environment or 0.0 for record in records)
        yield (
            f"  seconds  {generating:.3f} generating a {each}, {waiting:.3f} in the environment (all episodes at once)"
        )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g} on average, {min(values):g} to {max(values):g}"


def shortened(text: str) -> str:
    """`text`, without its middle where it is long.

    >>> shortened("a" * 5)
    'aaaaa'
    """
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} more characters ...]\n{text[-half:]}"


def _lines(label: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.rstrip("\n").split("\n")):
        yield f"  {label if number == 0 else '':<{_MARGIN}}| {line}"


def _cost(piece: Piece) -> str:
    tokens = _count(piece.tokens, "token") if piece.tokens is not None else ""
    if piece.record is None:
        return tokens
    waited = piece.record.environment
    environment = "" if waited is None else f", environment {waited:.3f} s"
    return f"{tokens or 'tokens not counted'} in {piece.record.generate:.3f} s{environment}"


def _parts(rewards: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:g}' for name, value in sorted(rewards.items()))})" if rewards else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
