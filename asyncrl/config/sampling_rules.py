"""Rules of truncated sampling: `actors.top_p`, `top_k`, `min_p`, and the kept ids that the learner needs under them."""

from __future__ import annotations

from asyncrl.config.tree import Tree

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
            f"top_k only. Set actors.top_k {actors.max_kept} (actors.max_kept), or use actors.engine hf."
        ]
    return []
