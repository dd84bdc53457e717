"""What `learner.teacher` asks of the other processes of a run."""

from __future__ import annotations

from asyncrl.config.tree import Tree


def scored_by_servers(c: Tree) -> bool:
    """Whether groups need the scores of a teacher on servers before they are trained on."""
    return bool(c.learner.teacher.path) and c.learner.teacher.scored_by == "servers"


def words_scored(c: Tree) -> int:
    """Words of each sampled token that the servers are asked for; 0: the sampled one alone."""
    teacher = c.learner.teacher
    return teacher.k if scored_by_servers(c) and teacher.over == "top_k" else 0


def scorer_names(c: Tree) -> list[str]:
    """The roles that ask the servers."""
    return [f"scorer-{i}" for i in range(c.learner.teacher.scorers)] if scored_by_servers(c) else []
