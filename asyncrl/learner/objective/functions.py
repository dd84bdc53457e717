"""The functions that the config names, with their options, and what they allow together."""

from __future__ import annotations

from asyncrl.config.demonstrations import SFT
from asyncrl.config.learner import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.corrections import CORRECTIONS, CorrectionInputs
from asyncrl.learner.corrections import properties_of as properties_of_correction
from asyncrl.learner.losses import AGGREGATIONS, LOSSES, LossInputs, properties_of
from asyncrl.learner.losses.aggregation import AggregationInputs
from asyncrl.learner.losses.value import ValueInputs, value_loss
from asyncrl.learner.objective.choice import Kind, chosen
from asyncrl.learner.objective.estimators import Estimators
from asyncrl.learner.objective.kl import KL, LIMITS
from asyncrl.learner.objective.shaping import SHAPING, ShapingInputs


class Functions:
    """Raises ConfigError, naming the field, for a name or option that cannot work."""

    def __init__(self, learner: LearnerConfig) -> None:
        self._learner = learner
        aggregation_options = dict(learner.aggregation_options)
        self.divide_by = aggregation_options.pop("denominator", "all")
        if self.divide_by not in ("all", "kept"):
            raise ConfigError(f"learner.aggregation_options.denominator is {self.divide_by!r}: expected all or kept.")
        self.estimators = Estimators(learner)
        self.loss = Kind(LOSSES, LossInputs).choose(learner.loss, learner.loss_options, "learner.loss")
        self.properties = properties_of(self.loss.function)
        """Declared by the loss."""
        self.aggregation = Kind(AGGREGATIONS, AggregationInputs).choose(
            learner.aggregation, aggregation_options, "learner.aggregation"
        )
        kl_options = dict(learner.kl_options)
        self.kl_limit: float | None = None
        """Limit of the KL times its weight, under `learner.kl_limit: weighted`."""
        if learner.kl_limit == "weighted":
            self.kl_limit = kl_options.get("limit", LIMITS.get(learner.kl))
            kl_options["limit"] = None
        self.kl = chosen(learner.kl, KL, kl_options, "learner.kl", ("logprobs", "reference"))
        given = () if learner.loss == SFT else learner.corrections  # nobody sampled a demonstration
        self.corrections = Kind(CORRECTIONS, CorrectionInputs).choose_all(
            given or ({"name": "none"},), "learner.corrections"
        )
        self.shaping = Kind(SHAPING, ShapingInputs).choose_all(learner.shaping, "learner.shaping")
        self.value_loss = Kind({"value_loss": value_loss}, ValueInputs).choose(
            "value_loss", learner.value_options, "learner.value"
        )

    def row_by_row(self) -> bool:
        """Whether the objective of a row depends on that row alone, up to what it is divided by."""
        corrections = ((properties_of_correction(c.function), c.options) for c in self.corrections)
        return (
            self.properties.row_by_row
            and self._learner.aggregation in AGGREGATIONS
            and self.divide_by == "all"
            and all(properties.row_by_row_with(options) for properties, options in corrections)
        )

    def linear_in_advantage(self) -> bool:
        """Whether the objective of a row without any advantage is 0, with gradient 0."""
        learner = self._learner
        kl_in_loss = learner.kl_coef > 0 and learner.kl_in != "reward"
        taught = bool(learner.teacher.path) and learner.teacher.coef > 0
        other_terms = kl_in_loss or learner.entropy_coef != 0 or learner.critic != "none" or taught
        return self.properties.linear_in_advantage and not other_terms
