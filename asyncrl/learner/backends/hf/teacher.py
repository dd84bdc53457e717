"""A teacher in the learner's process: a frozen model, sharded as the policy is, that scores the policy's tokens.

    part ─> teacher, no gradient ─> hidden states of the sampled tokens, head ─┐
      └───> policy ─> hidden states, head ───────────────────────────────────> compared (comparison.py)

Only the states of one micro-batch exist at a time, and never all logits of either model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config import Config, ModelConfig
from asyncrl.config.learner import LearnerConfig, TeacherConfig
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.backends.comparison import TeacherStates
from asyncrl.learner.backends.hf.lora import digest_of
from asyncrl.learner.backends.hf.scorer import Load, Scorer, Source
from asyncrl.learner.backends.protocol import Packed, Scores
from asyncrl.learner.distillation.divergence import Comparison, Divergence
from asyncrl.model import load_folder, load_tokenizer, teacher_folder
from asyncrl.rendering.same_words import refuse_other_words

FIELD = "learner.teacher.path"
Build = Callable[[Config, Load], Scorer]
"""A frozen scorer of the model that is loaded, checked and placed as the policy's is."""


class States(Protocol):
    """A teacher in this process."""

    digest: str

    def states(self, part: Packed) -> TeacherStates:
        """Of the part's sampled tokens. On several ranks all call it. Raises RunError for a row that is too long."""
        ...


class Teacher:
    """The frozen model, and what identifies it."""

    def __init__(self, scorer: Scorer, positions: int | None) -> None:
        """`positions`: the longest row that it can read; None: any."""
        self._scorer, self.digest, self._positions = scorer.requires_grad_(False), scorer.digest, positions

    def states(self, part: Packed) -> TeacherStates:
        refuse_longer(part, self._positions)
        return states_of(self._scorer, part)


def refuse_longer(part: Packed, positions: int | None) -> None:
    """Raises RunError for a row that a teacher of so many positions cannot read; None: it reads any."""
    if positions is not None and max(part.lengths) > positions:
        raise RunError(
            f"a row has {max(part.lengths)} tokens and the teacher reads {positions}: lower env.max_tokens, or choose "
            "a teacher of a longer context."
        )


def states_of(scorer: Scorer, part: Packed) -> TeacherStates:
    """What `scorer`, as a teacher, thinks of the part's sampled tokens; without gradient."""
    with torch.no_grad():
        hidden = scorer(replace(part, wants=frozenset(("hidden",)))).hidden
    weight = scorer.model.get_output_embeddings().weight.detach()
    return TeacherStates(hidden, weight.full_tensor() if isinstance(weight, DTensor) else weight)


class Taught:
    """The policy's scorer, which compares with the teacher where that is wanted."""

    def __init__(self, policy: Scorer, teacher: States | None, how: Comparison) -> None:
        """`teacher` None: it is on servers, and parts bring what these said of their tokens."""
        self._policy, self._teacher, self._how = policy, teacher, how

    def __call__(self, part: Packed) -> Scores:
        if "teacher" not in part.wants:
            scores: Scores = self._policy(part)
            return scores
        states = None if self._teacher is None else self._teacher.states(part)
        taught: Scores = self._policy(part, states, self._how)
        return taught


def teacher_of(config: Config, build: Build) -> Teacher | None:
    """The frozen teacher of `learner.teacher`; None without one, and for one on servers or that moves. Raises
    ConfigError, naming the field, for a folder that holds no model, for other words or another chat template than the
    policy's, and for a context shorter than the rows."""
    given = config.learner.teacher
    if not given.path or given.scored_by == "servers" or given.moves:
        return None
    learner = LearnerConfig.model_validate(
        config.learner.model_dump() | {"lora": {}, "teacher": {}, "activation_checkpointing": "none"}
    )
    model = ModelConfig(path=given.path, dtype=config.model.dtype)
    scorer = build(config.model_copy(update={"model": model, "learner": learner}), lambda: source_of_teacher(config))
    return Teacher(scorer, positions_of(scorer.model))


def source_of_teacher(config: Config) -> Source:
    """The teacher as it is on the disk, and whole. Raises ConfigError."""
    given = config.learner.teacher
    folder = teacher_folder(given.path)
    model = ModelConfig(path=str(folder), dtype=config.model.dtype)
    source = load_folder(folder, torch.float32, f"{FIELD} is {given.path!r}")
    if damaged := _not_finite(source):
        raise ConfigError(
            f"{FIELD} is {given.path!r}, and its weight {damaged} holds numbers that are not finite: give a teacher "
            "whose weights are whole."
        )
    refuse_other_words(load_tokenizer(config.model), load_tokenizer(model, FIELD), given.path, _words(source))
    positions = positions_of(source)
    if positions is not None and config.env.max_tokens > positions:
        raise ConfigError(
            f"env.max_tokens is {config.env.max_tokens}, and the teacher in {FIELD} ({given.path}) reads rows of at "
            f"most {positions} tokens: lower env.max_tokens, or choose a teacher of a longer context."
        )
    return Source(source, digest_of(source))


def comparison_of(given: TeacherConfig) -> Comparison:
    divergence = Divergence(given.divergence, given.jsd_beta)
    return Comparison(divergence, given.k if given.over == "top_k" else 0, given.top_k_of)


def _not_finite(model: PreTrainedModel) -> str:
    """The first weight with such a number; empty: none has."""
    return next((name for name, x in model.named_parameters() if not x.isfinite().all()), "")


def positions_of(model: PreTrainedModel) -> int | None:
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    return positions


def _words(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])
