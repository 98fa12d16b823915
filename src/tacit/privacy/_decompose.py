"""Event trees taken apart into single releases, with the neighbour relation's factor applied.

Formal guarantee: what comes out costs, under the relation, what the tree costs. Noise is relative to the clip C, and
under REPLACE_ONE a sum moves by up to 2C, so an unsampled event is handed on with half its noise; all plain Gaussians
are merged exactly (sum of mu^2). Poisson sampling under REPLACE_ONE keeps its noise: its dominating pair is its own.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import attr
from dp_accounting import dp_event

from tacit.privacy import events
from tacit.privacy._budget import Neighbours, sampled_pure
from tacit.privacy.events import (
    BallsInBinsDpEvent,
    CyclicPoissonDpEvent,
    DpEvent,
    NoisyMaxDpEvent,
    SharedNoiseDpEvent,
    StreamDpEvent,
    gaussian_noise,
    leaves,
)

TINY = 1e-100  # noise below this counts as none


class UnsupportedEvent(ValueError):
    """No accountant can bound this event under this relation."""


@dataclass
class Decomposition:
    """The single releases of an event tree under one neighbouring relation, its factor already applied.

    Args:
        mu_squared: The sum of mu^2 over all unsampled Gaussians.
        others: Every other release and how often it occurs.
        private: False if a release has no noise.
    """

    mu_squared: float = 0.0  # all unsampled Gaussians together
    others: Counter[DpEvent] = field(default_factory=Counter)
    private: bool = True

    @property
    def mu(self) -> float:
        return math.sqrt(self.mu_squared) if self.private else math.inf

    def add(self, plain: DpEvent | None, times: int) -> None:
        """``times`` releases to which the factor was applied; None is one without noise.

        Args:
            plain: The release.
            times: How often it occurs.
        """
        if plain is None:
            self.private = False
        elif isinstance(plain, dp_event.GaussianDpEvent):
            noise = plain.noise_multiplier  # of which the square may underflow: a Gaussian is free without end only
            self.mu_squared += 0.0 if math.isinf(noise) else times * max((1 / noise) ** 2, math.ulp(0.0))
        elif not _free(plain):
            self.others[plain] += times


def take_apart(event: DpEvent, neighbours: Neighbours) -> Decomposition:
    """Decompose an event tree into single releases, the relation's factor applied and all plain Gaussians merged.

    Args:
        event: The event tree.
        neighbours: The neighbouring relation.

    Returns:
        The releases.

    Raises:
        UnsupportedEvent: The tree has an event that cannot be bounded under this relation.
    """
    terms = Decomposition()
    for leaf, times in leaves(events.check(event)):
        if isinstance(leaf, CyclicPoissonDpEvent):
            leaf, times = _cyclic(leaf, neighbours), times * -(-leaf.steps // leaf.separation)
        terms.add(_divided(leaf, neighbours), times)
    return terms


def _cyclic(leaf: CyclicPoissonDpEvent, neighbours: Neighbours) -> DpEvent:
    """One of the ceil(steps / bands) releases of a cyclic stream.

    A unit of group j can be in the steps j, j + b, ...; the columns of C at these steps have rows j to j + b - 1, j + b
    to j + 2b - 1, ..., none in common. So C G + noise falls into parts, in each of which the unit is there with
    probability ``sample_rate`` and moves the sum by at most one column's norm times the clip: Poisson-subsampled
    Gaussians, one after the other, each of which may depend on those before. The earliest group has ceil(steps / b).
    """
    if neighbours is Neighbours.REPLACE_ONE:
        raise UnsupportedEvent(
            "Cyclic sampling under replace-one has no known bound, for who comes may be of another group. "
            "Declare the subject add-remove or zero-out."
        )
    return dp_event.PoissonSampledDpEvent(leaf.sample_rate, dp_event.GaussianDpEvent(leaf.noise_multiplier))


def pure_epsilon(event: DpEvent, neighbours: Neighbours) -> float:
    """The plain sum of a tree of pure-epsilon releases (delta = 0, where a Gaussian has no place).

    Args:
        event: The event tree.
        neighbours: The neighbouring relation.

    Returns:
        The sum of the epsilons.

    Raises:
        UnsupportedEvent: A release is not pure.
    """
    terms = take_apart(event, neighbours)
    if not terms.private:
        return math.inf
    if terms.mu_squared > 0:
        raise UnsupportedEvent("A Gaussian release has no pure epsilon: give a delta above 0, or use Laplace noise.")
    return math.fsum(times * pure_of(leaf) for leaf, times in terms.others.items())


def _divided(leaf: DpEvent, neighbours: Neighbours) -> DpEvent | None:
    """One release as the accountants take it; None if it has no noise at all."""
    factor = neighbours.factor
    match leaf:
        case dp_event.NonPrivateDpEvent():
            return None
        case CyclicPoissonDpEvent():
            raise UnsupportedEvent("A cyclic stream is several releases: take_apart has them.")
        case StreamDpEvent():
            if neighbours is Neighbours.ADD_REMOVE and leaf.fixed_places:
                raise UnsupportedEvent(
                    "A stream is one release only if no unit's place depends on the other units: "
                    "declare its subject replace-one or zero-out, not add-remove."
                )
            return _divided(dp_event.GaussianDpEvent(leaf.noise_multiplier), neighbours)
        case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent() | NoisyMaxDpEvent():
            if not leaf.noise_multiplier >= 0:
                raise ValueError(f"A noise multiplier is not negative; got {leaf.noise_multiplier:g}.")
            noise = leaf.noise_multiplier / factor
            return attr.evolve(leaf, noise_multiplier=noise) if noise > TINY else None
        case SharedNoiseDpEvent():
            noise = leaf.noise_multiplier / factor
            if not noise > TINY:
                return None
            # a pure epsilon of 1/noise is what a noisy max of twice the noise costs, under every accountant
            return dp_event.GaussianDpEvent(noise) if leaf.kind == "gaussian" else NoisyMaxDpEvent(2 * noise)
        case dp_event.DiscreteLaplaceDpEvent():
            return attr.evolve(leaf, sensitivity=leaf.sensitivity * factor) if leaf.noise_parameter else None
        case dp_event.PoissonSampledDpEvent():
            return _sampled(leaf, neighbours)
        case dp_event.SampledWithoutReplacementDpEvent():
            noise = gaussian_noise(leaf.event)
            if neighbours is not Neighbours.REPLACE_ONE or noise is None:
                raise UnsupportedEvent(
                    "Sampling without replacement is bounded for Gaussian noise under replace-one only."
                )
            if noise <= TINY:
                return None
            inner = dp_event.GaussianDpEvent(noise / factor)
            return inner if leaf.sample_size == leaf.source_dataset_size else attr.evolve(leaf, event=inner)
        case BallsInBinsDpEvent():
            if neighbours is Neighbours.REPLACE_ONE:
                raise UnsupportedEvent(
                    "Balls-in-bins sampling has no bound here under replace-one, for who comes may be in another bin "
                    "than who goes. Declare the subject add-remove or zero-out."
                )
            if leaf.noise_multiplier <= TINY:
                return None
            return dp_event.GaussianDpEvent(leaf.noise_multiplier / math.sqrt(leaf.steps)) if leaf.bins == 1 else leaf
        case dp_event.ZCDpEvent():
            return attr.evolve(leaf, rho=leaf.rho * factor**2)  # what xi becomes depends on the order: ``accounting``
        case dp_event.RandomizedResponseDpEvent() if neighbours is Neighbours.REPLACE_ONE:
            return leaf if leaf.noise_parameter else None
        case dp_event.RepeatAndSelectDpEvent():
            events.repeat_and_select(leaf.event, mean=leaf.mean, shape=leaf.shape)  # refused unless it makes sense
            inner = take_apart(leaf.event, neighbours)
            parts = [dp_event.SelfComposedDpEvent(e, n) for e, n in inner.others.items()]
            if inner.mu_squared:
                parts.append(dp_event.GaussianDpEvent(inner.mu_squared**-0.5))
            return (
                dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(tuple(parts)), leaf.mean, leaf.shape)
                if inner.private
                else None
            )
    raise UnsupportedEvent(f"No accountant bounds {type(leaf).__name__} under {neighbours}.")


def _sampled(leaf: DpEvent, neighbours: Neighbours) -> DpEvent | None:
    """A Poisson draw and what is released from it: several Gaussians of one draw are one joint Gaussian."""
    rate, noise = leaf.sampling_probability, gaussian_noise(leaf.event)
    if not 0 <= rate <= 1:
        raise ValueError(f"A sample rate is a probability; got {rate:g}.")
    for inner, _ in leaves(leaf.event):
        if not getattr(inner, "noise_multiplier", 0.0) >= 0:
            raise ValueError(f"A noise multiplier is not negative; got {inner.noise_multiplier:g}.")
    if noise is not None:
        if noise <= TINY:
            return None
        if rate == 1:
            return dp_event.GaussianDpEvent(noise / neighbours.factor)
        return dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
    if isinstance(leaf.event, dp_event.LaplaceDpEvent) and neighbours is not Neighbours.REPLACE_ONE:
        if rate == 1:
            return _divided(leaf.event, neighbours)
        return leaf if leaf.event.noise_multiplier > TINY else None
    raise UnsupportedEvent(
        f"Poisson sampling of {type(leaf.event).__name__} under {neighbours} has no known bound: sample Gaussian "
        "releases, or account under add-remove or zero-out."
    )


def _free(plain: DpEvent) -> bool:
    """Whether a release reveals nothing: infinite noise, or a sampling rate of zero."""
    if isinstance(plain, dp_event.PoissonSampledDpEvent):
        return bool(plain.sampling_probability == 0) or _free(plain.event)
    return bool(math.isinf(getattr(plain, "noise_multiplier", 0.0)))


def pure_of(leaf: DpEvent) -> float:
    """The epsilon of one release whose delta is 0 (the relation's factor already applied).

    Args:
        leaf: A Laplace or noisy-max release.

    Returns:
        Its epsilon.
    """
    match leaf:
        case dp_event.LaplaceDpEvent():
            return 1 / float(leaf.noise_multiplier)
        case NoisyMaxDpEvent():
            return 2 / float(leaf.noise_multiplier)
        case dp_event.DiscreteLaplaceDpEvent():
            return float(leaf.noise_parameter) * int(leaf.sensitivity)
        case dp_event.RandomizedResponseDpEvent():
            return math.log1p((1 - leaf.noise_parameter) * leaf.num_buckets / leaf.noise_parameter)
        case dp_event.PoissonSampledDpEvent() if isinstance(leaf.event, dp_event.LaplaceDpEvent):
            return sampled_pure(leaf.sampling_probability, pure_of(leaf.event))
        case dp_event.RepeatAndSelectDpEvent():
            raise UnsupportedEvent(
                "The best of a random number of runs is bounded by Renyi divergences only: give the subject the renyi "
                "or the plan mode."
            )
    raise UnsupportedEvent(f"{type(leaf).__name__} is neither a plain Gaussian nor pure epsilon.")
