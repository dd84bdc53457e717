"""Rules for a teacher (`learner.teacher`): combinations that cannot work."""

from __future__ import annotations

from asyncrl.config.learner import PLACE, POLICY, TeacherConfig
from asyncrl.config.tree import Tree

MAX_K = 1024
"""Most words of a token that a record of scores holds."""


MAX_SCORE_BYTES = 254 << 20
"""Most bytes of the record of one group's scores, beside its header."""


def learns_from_teacher(c: Tree) -> bool:
    """Whether there is something to learn where rewards are equal."""
    return bool(c.learner.teacher.path) and c.learner.teacher.coef > 0


def of_teacher(c: Tree) -> list[str]:
    """One sentence each, with field, value, expectation and remedy."""
    teacher, problems = c.learner.teacher, []
    if not teacher.path:
        given = sorted(name for name, value in teacher if value != getattr(TeacherConfig(), name))
        return (
            [f"learner.teacher.{given[0]} is set and learner.teacher.path is empty: name a teacher."] if given else []
        )
    if teacher.into == "advantage" and teacher.over != "token":
        problems.append(
            f"learner.teacher.into is advantage and learner.teacher.over {teacher.over}: a divergence over several "
            "words is the same whichever was sampled, so that as an advantage it teaches nothing. Set "
            "learner.teacher.over token, or learner.teacher.into loss."
        )
    if teacher.over == "token" and c.actors.truncated:
        problems.append(
            f"learner.teacher.over is token while actors.top_p is {c.actors.top_p}, top_k {c.actors.top_k} and min_p "
            f"{c.actors.min_p}: the policy's logprobs are then over the ids that each token was drawn from, and the "
            "teacher's over all. Set learner.teacher.over vocabulary, or top_p 1, top_k 0 and min_p 0."
        )
    problems += _on_servers(c) + _moving(c)
    if teacher.coef == 0 and teacher.reward_weight == 0:
        problems.append(
            "learner.teacher.coef and learner.teacher.reward_weight are both 0, so that nothing is learned: set one "
            "above 0."
        )
    if learns_from_teacher(c) and teacher.reward_weight == 0:
        problems += _without_reward(c)
    return problems


_MOVING = ("update_rate", "shown", "answer_field", "shown_as", "shown_tokens")


def _moving(c: Tree) -> list[str]:
    """What a teacher cannot do that is the policy itself, and where its fields would have no effect."""
    teacher, problems = c.learner.teacher, []
    if not teacher.moves:
        given = [name for name in _MOVING if getattr(teacher, name) != getattr(TeacherConfig(), name)]
        return [
            f"learner.teacher.{name} is {getattr(teacher, name)!r} and learner.teacher.path {teacher.path!r}: only a "
            f"teacher that is the policy itself reads it. Set learner.teacher.path {POLICY}, or leave it out."
            for name in given
        ]
    if teacher.scored_by == "servers":
        problems.append(
            f"learner.teacher.path is {POLICY} and learner.teacher.scored_by servers: a server does not have the "
            "weights of each training step. Set scored_by learner, and leave servers out."
        )
    if teacher.update_rate == 1 and teacher.shown == "nothing":
        problems.append(
            f"learner.teacher.path is {POLICY}, update_rate 1 and shown nothing: teacher and policy are the same, so "
            "that there is nothing to learn. Set shown answer or feedback, or an update_rate below 1."
        )
    if teacher.shown_as and teacher.shown_as.count(PLACE) != 1:
        problems.append(
            f"learner.teacher.shown_as is {teacher.shown_as!r}, expected a text with {PLACE} in it once: it stands for "
            "what is shown."
        )
    if 0 < teacher.update_rate < 1 and c.learner.lora.r:
        problems.append(
            f"learner.teacher.update_rate is {teacher.update_rate:g} and learner.lora.r {c.learner.lora.r}: the "
            "average of adapters is not the adapter of the average. Set update_rate 1 or 0, or lora.r 0."
        )
    return problems


def _on_servers(c: Tree) -> list[str]:
    """What servers cannot give, and where their fields would have no effect."""
    teacher, problems = c.learner.teacher, []
    if teacher.scored_by == "learner":
        if teacher.servers:
            problems.append(
                "learner.teacher.servers is set and learner.teacher.scored_by is learner: set scored_by servers, or "
                "leave servers out."
            )
        return problems
    if not teacher.servers:
        problems.append(
            "learner.teacher.scored_by is servers and learner.teacher.servers is empty: name the URLs of the servers "
            "that serve the teacher."
        )
    problems += [
        f"learner.teacher.servers names {url!r}, expected http://host:port."
        for url in teacher.servers
        if not url.startswith(("http://", "https://"))
    ]
    if teacher.over == "vocabulary":
        problems.append(
            "learner.teacher.over is vocabulary and learner.teacher.scored_by servers, which give the logprobs of "
            "single words: set over top_k, a lower bound of the divergence, or over token; or load the teacher in "
            "the learner (scored_by learner)."
        )
    if teacher.over == "top_k" and teacher.top_k_of == "student":
        problems.append(
            "learner.teacher.top_k_of is student and learner.teacher.scored_by servers, which give the teacher's own "
            "most likely words: set top_k_of teacher, or scored_by learner."
        )
    if teacher.over == "top_k" and teacher.k > MAX_K:
        problems.append(f"learner.teacher.k is {teacher.k}, expected at most {MAX_K} with scored_by servers.")
    words = teacher.k if teacher.over == "top_k" else 0
    if (most := c.learner.group_size * c.env.max_tokens * 4 * (2 * words + 1)) > MAX_SCORE_BYTES:
        problems.append(
            f"the scores of one group may have {most} bytes with learner.teacher.k {words}, learner.group_size "
            f"{c.learner.group_size} and env.max_tokens {c.env.max_tokens}, expected at most "
            f"{MAX_SCORE_BYTES}: lower one of them."
        )
    if c.actors.temperature != 1:
        problems.append(
            f"actors.temperature is {c.actors.temperature} and learner.teacher.scored_by servers, which give prompt "
            "logprobs at temperature 1: set actors.temperature 1, or scored_by learner."
        )
    return problems


def _without_reward(c: Tree) -> list[str]:
    problems = []
    if "zero_variance" in c.buffer.filters:
        problems.append(
            "buffer.filters drops groups of equal rewards (zero_variance), and learner.teacher.reward_weight is 0: the "
            "teacher's lesson does not depend on rewards. Leave the filter out."
        )
    if c.buffer.on_starved == "end":
        problems.append(
            "buffer.on_starved is end, which takes equal rewards for a solved task, and learner.teacher.reward_weight "
            "is 0: set buffer.on_starved train."
        )
    if c.learner.critic != "none":
        problems.append(
            f"learner.critic is {c.learner.critic} and learner.teacher.reward_weight 0: nothing reads its values. Set "
            "learner.critic none, or a reward_weight above 0."
        )
    return problems
