"""Off-policy corrections: the table of `learner.corrections`, and the contract for one of your own.

Every correction is a function `(inputs: CorrectionInputs, *, options) -> Correction`. With log w = proximal - behaviour
(it, or its sum over a row, clamped to ±20 before exp): the proximal logprobs are the learner's at the start of the
training step, the behaviour logprobs what the engine reported. w covers two things at once: staleness, and the engine
and the learner disagreeing about the same weights. All of it is constant. Several corrections compose in a list
(`compose`).

`keep` says which tokens stay in the loss; `weights` is exactly 0 where `keep` is false, so multiplying by the weights
applies both. The loss's denominator is that of the original mask, so that a batch of which much was rejected makes a
small step, unless `denominator: kept` is asked for.
"""

from __future__ import annotations

from asyncrl.learner.corrections.correction import (
    Correction,
    CorrectionFunction,
    CorrectionInputs,
    CorrectionProperties,
    compose,
    correction,
    properties_of,
)
from asyncrl.learner.corrections.rejections import kl_reject, m2po, opsm, veto
from asyncrl.learner.corrections.weights import clamp, icepop, mis, none, tis

__all__ = [
    "CORRECTIONS",
    "Correction",
    "CorrectionInputs",
    "CorrectionProperties",
    "compose",
    "correction",
    "properties_of",
]

CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": none,
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "clamp": clamp,
    "kl_reject": kl_reject,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
}
