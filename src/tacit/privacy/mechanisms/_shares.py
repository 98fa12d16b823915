"""Shares of one noise: what each of several parties adds so that their total, which alone is seen, has enough of it.

Noise that every party adds by itself grows with the number of parties. If only the total is seen (secure
aggregation), the parties need one noise between them, and each adds a part of it. Both kinds below can be divided into
independent parts, so that the total of ``honest`` parts is the noise that was charged; parts beyond that come on top,
and parts that colluding parties give away or that are lost are not counted on.
"""

from __future__ import annotations

import math
import secrets

import opendp.prelude as dp
import torch

from tacit.privacy._noise import NoiseKey
from tacit.privacy._queries import GridSum
from tacit.privacy._receipts import Receipt, ReceiptError, consume
from tacit.privacy.events import SharedNoiseDpEvent, leaves
from tacit.privacy.mechanisms._mechanisms import SMOOTHING, UP, bound_of, integers

_WIDEST = 2.0**24  # of a share of Laplace noise, in grid steps: each takes about that many proposals
_AT_ONCE = 1 << 12


def share(query: GridSum, receipt: Receipt) -> tuple[int, ...]:
    """This party's sum with its share of one noise, in whole grid steps: to be added up with the others', unseen.

    What is returned is **not public by itself**: one share is far less noise than was charged. It may enter a secure
    aggregation and nothing else.

    Formal guarantee: let ``honest`` parties, this one among them, add shares that are kept to themselves, and let the
    total alone be seen (of these and any others, each of which may be known). Then the total is, for this party's
    units, the release that was charged.

    - *Laplace.* A share is A - B with A and B negative binomial, P(k) = C(k + r - 1, k) (1 - p)^r p^k, r = 1 / honest
      and p = exp(-1 / scale). Negative binomials of one p add up by adding their r, so ``honest`` shares are the
      difference of two geometric numbers: discrete Laplace noise, P(m) in proportion to exp(-|m| / scale). Moved by d
      steps its probabilities change by at most e^(d / scale), in several values by the product of these: pure epsilon,
      the L1 sensitivity over the scale.
    - *Gaussian.* A share is discrete Gaussian noise of variance s^2 / honest + 9 around an integer. As in
      ``gaussian_query``, that is N(0, s^2 / honest) and then an integer drawn from the discrete Gaussian of variance 9
      around it. Two discrete Gaussians of variances u and v around real centres add up to the one of variance u + v
      around the sum of the centres, up to a factor within 2 exp(-2 pi^2 uv / (u + v)) of 1 (Poisson summation), here
      within 1e-38 for each of the shares. So the total is post-processing of the Gaussian that was charged.

    What others add is independent of this party's data: adding it is post-processing as well. Noise is drawn exactly,
    in integers; the caller may reduce the result modulo any number, which is post-processing of the total.

    Args:
        query: A bounded sum from ``grid_sum``.
        receipt: Pays for the release (``events.shared_noise``).

    Returns:
        The sums with a share of noise, in grid steps. Private until they are added up.

    Raises:
        ReceiptError: The receipt does not cover this release.
    """
    paid = [leaf for leaf, _ in leaves(receipt.event)] if isinstance(receipt, Receipt) else []
    kinds = {leaf.kind for leaf in paid if isinstance(leaf, SharedNoiseDpEvent)}
    if len(kinds) > 1:
        raise ReceiptError("A receipt pays for shares of one kind of noise: charge the other kind by itself.")
    bound = bound_of(query, "l2" if kinds == {"gaussian"} else "l1", receipt)
    event, release, key = consume(receipt, SharedNoiseDpEvent, bound)
    scale, count = event.noise_multiplier * bound / query.grid * UP, len(query.total)
    if key.seeded:
        noise = _seeded(key, release, event, scale, count)
    elif not scale:
        noise = [0] * count
    elif event.kind == "laplace":
        up, down = _negative_binomial(scale, event.honest, count), _negative_binomial(scale, event.honest, count)
        noise = [a - b for a, b in zip(up, down, strict=True)]
    else:
        space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
        std = math.hypot(scale / math.sqrt(event.honest), SMOOTHING)
        noise = (space >> dp.m.then_gaussian(scale=std))([0] * count)
    return tuple(value + more for value, more in zip(integers(query, receipt), noise, strict=True))


def _negative_binomial(scale: float, parts: int, count: int) -> list[int]:
    """Exact samples of the negative binomial distribution with r = 1/``parts`` and p = exp(-1/scale), by rejection.

    A geometric number k, P(k) = (1 - p) p^k, is accepted with probability C(k + r - 1, k), which is the product over j
    up to k of (j - 1 + r) / j = ((j - 1) parts + 1) / (j parts): one fair draw of a whole number each.

    How long that takes depends on the noise and on nothing else: no data are in it. But whoever could time it exactly
    would learn about the noise, so what is made of it must not leave at a time that shows it (the federated client
    waits for whole quarters of a second).
    """
    if not scale < _WIDEST:
        raise ReceiptError("This noise is wider than 2^24 grid steps: give the query a coarser grid.")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    propose = space >> dp.m.then_laplace(scale=scale)
    found: list[int] = []
    while len(found) < count:
        for m in propose([0] * min(_AT_ONCE, 16 + count * math.ceil(scale))):
            k = m if m >= 0 else -m - 1  # discrete Laplace noise folded at zero is geometric
            if all(secrets.randbelow(j * parts) < (j - 1) * parts + 1 for j in range(1, k + 1)):
                found.append(k)
                if len(found) == count:
                    break
    return found


def _seeded(key: NoiseKey, release: int, event: SharedNoiseDpEvent, scale: float, count: int) -> list[int]:
    """Reproducible noise whose total has the same variance, for tests: not private."""
    part = scale / math.sqrt(event.honest)
    if event.kind == "gaussian":
        drawn = key.normals(release, count) * part
    else:
        u = key.uniforms(release, count) - 0.5
        drawn = -part * torch.sign(u) * torch.log1p((-2 * u.abs()).clamp_min(-1 + 2**-53))
    return [int(value) for value in drawn.round().tolist()]
