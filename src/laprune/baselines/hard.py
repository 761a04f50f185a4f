"""Hard top-k with a straight-through gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laprune.baselines._common import constant_mask, rank_scores, rows_of

__all__ = ["hard_mask", "hard_topk_ste"]


def hard_mask(rows: Tensor, k: float) -> Tensor:
    """Indicator of the k largest scores of each row, the lowest index first among ties.

    A fractional k gives its fractional part to the next score in that order. No row is sorted.

    >>> hard_mask(torch.tensor([[1.0, 2.0, 2.0, 2.0]]), 2.5)
    tensor([[0.0000, 1.0000, 1.0000, 0.5000]])
    """
    threshold = rank_scores(rows, max(1, math.ceil(k)))
    above = rows > threshold
    tied = rows == threshold
    taken = above.sum(-1, keepdim=True) + tied.cumsum(-1) - 1
    share = (k - taken.double()).clamp(0.0, 1.0).to(rows.dtype)
    return torch.where(tied, share, above.to(rows.dtype))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, k: float) -> Tensor:
        return hard_mask(rows, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def hard_topk_ste(scores: Tensor, k: float, softness: float = 0.0) -> Tensor:
    """Indicator of the k largest scores, with the identity as its gradient.

    The identity is the usual straight-through estimator: the upstream gradient reaches every score
    unchanged, selected or not. `softness` is ignored. At k = 0 and k = n the mask is constant and
    so is its gradient, zero.

    >>> x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    >>> p = hard_topk_ste(x, 2)
    >>> (p * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    >>> p.tolist(), x.grad.tolist()
    ([1.0, 0.0, 1.0], [1.0, 2.0, 3.0])
    """
    rows = rows_of(scores, k)
    mask = constant_mask(rows, k)
    if mask is None:
        mask = _StraightThrough.apply(rows, k)
    return mask.reshape(scores.shape).to(scores.dtype)
