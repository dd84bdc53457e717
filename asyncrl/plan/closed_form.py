"""Mean staleness in closed form, from rates, cadence, batch and bound (docs/how-to/planning.md derives it). Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """What each side does alone. Seconds."""

    in_flight: float
    """N, groups: the slots of all actors over `learner.group_size`."""
    latency: float
    """L, of one episode, from its ticket to its trajectory, with all slots in use."""
    remaining: float
    """R, from the sampling of a token to its group's last trajectory, mean over tokens."""
    age: float
    """A, from the issue of a ticket to the sampling of a token, mean over tokens."""
    training: float
    """T, from the fixed batch to its outcome."""
    delay: float
    """D, from the outcome until the actors hold its version."""

    def period(self, groups_per_step: int) -> float:
        """Seconds of a training step where generation is the slower side."""
        return groups_per_step * self.latency / self.in_flight


def smallest_bound(rates: Rates, groups_per_step: int, every: int = 1) -> float:
    """The bound from which on admission leaves no slot without a ticket while generation is the slower side."""
    late = (rates.training + rates.delay) / rates.period(groups_per_step)
    return rates.in_flight / groups_per_step + late + every - 1


def mean_staleness(rates: Rates, groups_per_step: int, max_staleness: int, every: int = 1) -> float:
    """Training steps, mean over the tokens that carry loss, under `fifo` with `max_uses: 1`.

    >>> rates = Rates(in_flight=12, latency=1.0, remaining=0.7, age=0.5, training=0.5, delay=0.1)
    >>> round(mean_staleness(rates, 24, 4), 2), round(mean_staleness(rates, 24, 0), 2)
    (0.63, 0.0)
    """
    period = rates.period(groups_per_step)
    if period >= rates.training:
        waits = (rates.remaining + rates.training + rates.delay) / period - 0.5 / groups_per_step
        return max(0.0, min(waits + (every - 1) / 2, float(max_staleness) - (every - 1) / 2))
    seen = (period / 2 + rates.age) / (every * rates.training)
    return max(0.0, max_staleness - (every - 1) / 2 - every * _whole(seen))


def _whole(mean: float) -> float:
    """The mean of the whole part of a number that is uniform between 0 and twice `mean`.

    >>> _whole(0.25), _whole(1.0)
    (0.0, 0.5)
    """
    most = 2 * mean
    full = int(most)
    return (full * (full - 1) / 2 + full * (most - full)) / most if most else 0.0
