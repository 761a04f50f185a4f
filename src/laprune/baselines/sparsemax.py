"""Budgeted sparsemax from the `entmax` package."""

from __future__ import annotations

from torch import Tensor

from laprune.baselines._common import around_the_cut, constant_mask, import_optional, rows_of

__all__ = ["budget_sparsemax"]


def budget_sparsemax(scores: Tensor, k: float, softness: float = 1.0) -> Tensor:
    """Maximise <r, p> - (softness/2) |p|^2 over masks of mass k in [0, 1], by bisection.

    This is the Euclidean projection of r/softness onto the masks of mass k, with exact zeros and
    ones. The package's gradient mixes rows of some shapes, so it only ever sees a matrix here.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        softness: weight of the quadratic regularisation, positive.

    >>> import torch
    >>> budget_sparsemax(torch.tensor([3.0, 1.0, 0.75, -1.0]), k=2)
    tensor([1.0000, 0.6250, 0.3750, 0.0000])
    """
    entmax = import_optional("entmax", "budget_sparsemax")
    rows = rows_of(scores, k, softness)
    mask = constant_mask(rows, k)
    if mask is None:
        mask = entmax.budget_bisect(around_the_cut(rows, k, softness), budget=float(k), dim=-1)
    return mask.reshape(scores.shape).to(scores.dtype)
