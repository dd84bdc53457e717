"""Rules on the length of an episode: in tokens, turns and seconds."""

from __future__ import annotations

from asyncrl.config.tree import Tree


def of_episodes(c: Tree) -> list[str]:
    """Limits of episodes that cannot work: one sentence each."""
    problems = []
    new, row = c.actors.max_new_tokens, c.env.max_tokens
    if new >= row:
        problems.append(
            f"actors.max_new_tokens is {new} but a whole row may have env.max_tokens = {row}: lower the former or "
            "raise the latter."
        )
    elif c.env.compact and (left := row - int(c.env.compact * row)) <= new:
        problems.append(
            f"env.compact is {c.env.compact:g}: of env.max_tokens = {row} it leaves {left} tokens for the request and "
            f"the summary, which may have actors.max_new_tokens = {new}: lower env.compact or actors.max_new_tokens."
        )
    if c.env.compact and c.env.max_turns < 3:
        problems.append(
            f"env.compact is {c.env.compact:g} and env.max_turns {c.env.max_turns}: a summary is a turn, between one "
            "before and one after it. Raise env.max_turns to at least 3, or set env.compact 0."
        )
    if c.env.compact:
        problems += _by_turn_number(c)
    if 0 < c.actors.episode_max_s < c.actors.episode_s:
        problems.append(
            f"actors.episode_max_s is {c.actors.episode_max_s:g} but actors.episode_s {c.actors.episode_s:g}: the "
            "former extends the latter. Raise it, or set it to 0."
        )
    return problems


def _by_turn_number(c: Tree) -> list[str]:
    """One sentence for each estimator that compares turns of equal number, which summaries shift."""
    chosen = {"learner.advantage": (c.learner.advantage, c.learner.advantage_options)} | {
        f"learner.advantage_by_env.{env}": (spec.get("name"), spec) for env, spec in c.learner.advantage_by_env.items()
    }
    return [
        f"{field} is turn_grpo with variant turn, which compares turns of equal number, and env.compact is "
        f"{c.env.compact:g}: a summary takes a number, so that it would be compared with siblings' turns. Use the "
        "variant process, turn_returns or gigpo; or set env.compact 0."
        for field, (name, options) in chosen.items()
        if name == "turn_grpo" and options.get("variant", "turn") == "turn"
    ]
