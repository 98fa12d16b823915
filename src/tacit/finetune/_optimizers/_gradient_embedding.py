"""Gradient embedding perturbation: private gradients in a subspace that public gradients span."""

from __future__ import annotations

from typing import Any, Unpack

from tacit.finetune._optimizers._optimizer import Optimizer, expected_batch_size
from tacit.finetune._sampling import Poisson
from tacit.finetune._sources import as_records
from tacit.finetune._subspace import Embedding
from tacit.finetune._updates import Options, Update


def GEP(  # noqa: N802
    *,
    public: Any,
    batch_size: int | None = None,
    steps: int,
    dimensions: int = 100,
    clip_embedding: float = 1.0,
    clip_residual: float = 0.2,
    residual: bool = True,
    refresh: int = 1,
    power_iterations: int = 1,
    batch: int | None = None,
    **update: Unpack[Options],
) -> Optimizer:
    """Gradient embedding perturbation (Yu et al., 2021): little noise where public gradients point, the rest clipped.

    The gradients of public rows span a subspace, made anew every `refresh` steps. Memory: `dimensions` times the
    trained parameters for the basis, and one gradient per row of a micro-batch.

    Formal guarantee: unit and neighbours as in DPSGD. A step releases, from one Poisson draw, the sum of embeddings
    (one unit: at most `clip_embedding`) and the sum of residuals (`clip_residual`), each with sqrt(2) times the noise
    multiplier that was charged: one Gaussian release, sampled once. The basis is made of public rows and released
    weights. `residual=False` releases the embeddings alone.

    Args:
        public: (inputs, labels) or any records, of rows that need no protection.
        batch_size: The expected batch size.
        steps: The number of steps.
        dimensions: Of the subspace.
        clip_embedding: The L2 bound of a unit's embedding.
        clip_residual: The L2 bound of a unit's residual.
        residual: Whether residuals are released at all.
        refresh: Steps between two bases.
        power_iterations: Of the basis.
        batch: The earlier name of `batch_size`; it warns.
        **update: Arguments of `Update`.

    Returns:
        An optimizer for `fit`.
    """
    query = Embedding(
        public=as_records(public),
        dimensions=dimensions,
        clip_embedding=clip_embedding,
        clip_residual=clip_residual,
        residual=residual,
        refresh=refresh,
        power_iterations=power_iterations,
    )
    return Optimizer(
        name="GEP",
        steps=steps,
        sampler=Poisson(expected_batch_size(batch_size, batch, "GEP")),
        query=query,
        update=Update(**update),
    )
