"""DFTopK: a closed-form threshold and a logistic mask, without a budget constraint."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laprune.baselines._common import constant_mask, rank_scores, rows_of

__all__ = ["dftopk"]


def _threshold(rows: Tensor, k: float) -> Tensor:
    """Midpoint of the k-th and (k+1)-th largest scores, interpolated for a fractional k."""
    n = rows.shape[-1]
    position = min(max(k + 0.5, 1.0), float(n))
    upper = min(math.floor(position), n - 1) if n > 1 else 1
    weight = position - upper
    high = rank_scores(rows, upper)
    return torch.lerp(high, rank_scores(rows, upper + 1), weight) if weight > 0 else high


def dftopk(scores: Tensor, k: float, tau: float = 1.0) -> Tensor:
    """Logistic mask around the midpoint of the k-th and (k+1)-th largest scores.

    The mass is k only in the limit of a small tau. As there is no score above the first or below
    the last, `k = 0` gives zeros and `k = n` gives ones.

    Args:
        scores: any shape, rows along the last dimension; differentiable, also through the
            two scores of the threshold.
        k: how many scores lie above the threshold, 0 to n.
        tau: width of the logistic, positive.

    >>> dftopk(torch.tensor([3.0, 1.0, 0.0, -1.0]), k=2, tau=0.5)
    tensor([0.9933, 0.7311, 0.2689, 0.0474])
    """
    rows = rows_of(scores, k, tau)
    mask = constant_mask(rows, k)
    if mask is None:
        mask = torch.sigmoid((rows - _threshold(rows, k)) / tau)
    return mask.reshape(scores.shape).to(scores.dtype)
