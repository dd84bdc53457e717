"""Rules of truncated sampling: `actors.top_p`, `top_k`, `min_p`, and the kept ids that the learner needs under them."""

from __future__ import annotations

from asyncrl.config.tree import Tree
from asyncrl.trajectory.kept_ids import MAX_KEPT

UNDER_TOP_K = ("vllm", "vllm_server")
"""Engines that return kept ids under `top_k` only."""


def of_sampling(c: Tree) -> list[str]:
    """One sentence for each setting that cannot work, with field, value, expectation and remedy."""
    actors = c.actors
    if not actors.truncated:
        return []
    chosen = f"actors.top_p is {actors.top_p}, top_k {actors.top_k} and min_p {actors.min_p}"
    if actors.max_kept == 0:
        if c.learner.unsafe:
            return []
        return [
            f"actors.max_kept is 0 while {chosen}: the learner's logprobs would be over tokens that could not be "
            "sampled. Set actors.max_kept 256; or top_p 1, top_k 0 and min_p 0; or learner.unsafe: true."
        ]
    if actors.engine == "sglang":
        return [
            f"{chosen}, and actors.engine sglang, of which the learner gets neither kept ids nor logprobs over them: "
            "use hf or vllm; or top_p 1, top_k 0 and min_p 0."
        ]
    if actors.engine in UNDER_TOP_K and not actors.top_k:
        return [
            f"{chosen}, and actors.engine {actors.engine}: vLLM returns the ids that a token was drawn from under "
            f"top_k only. Set actors.top_k {_with_slack(actors.max_kept)}, half of actors.max_kept, or use "
            "actors.engine hf."
        ]
    return []


def without_slack(c: Tree) -> str | None:
    """Why tokens may lose their loss to equal logits; None if they will not in practice."""
    actors = c.actors
    if actors.engine not in UNDER_TOP_K or not actors.max_kept or actors.top_k <= _with_slack(actors.max_kept):
        return None
    return (
        f"actors.top_k is {actors.top_k}, actors.max_kept {actors.max_kept} and actors.engine {actors.engine}: vLLM "
        "keeps all ids whose logit equals that of the last of the top_k, and a token with more than max_kept ids "
        f"carries no loss. Set actors.top_k {_with_slack(actors.max_kept)} or less, or raise actors.max_kept to twice "
        f"top_k (at most {MAX_KEPT})."
    )


def _with_slack(max_kept: int) -> int:
    return max(1, max_kept // 2)
