"""LapSum: the Laplace-CDF mask of exact mass at a fixed temperature, by sorting.

Find the barrier b with sum_i sigma((r_i - b)/t) = k, where sigma is the Laplace CDF. Between two
consecutive scores the sum is a quadratic in exp(b/t), so once the right gap is known b has a closed
form; prefix and suffix log-sum-exps of the sorted scores give the sum at every score at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from laprune.baselines._common import constant_mask, rows_of

__all__ = ["lapsum_barrier", "lapsum_sort"]


def _log_w(m: Tensor, log_above: Tensor, log_below: Tensor) -> Tensor:
    """Positive root w of  A w^2 - 2 m w - B = 0,  in logarithms and free of cancellation.

    With m scores more than k above the barrier, A = sum_above exp(-r/t) and
    B = sum_below exp(r/t), this is the budget equation for w = exp(b/t) inside a gap.
    """
    root = m.abs() + torch.sqrt(m * m + torch.exp(log_above + log_below))
    log_root = root.log()
    middle = (log_below - log_above) / 2
    return torch.where(
        m > 0, log_root - log_above, torch.where(m < 0, log_below - log_root, middle)
    )


def _surplus(count: Tensor, k: float, dtype: torch.dtype) -> Tensor:
    """count - k, with the difference of integers taken exactly."""
    whole = math.floor(k)
    return (count - whole).to(dtype) - (k - whole)


def _gap(x: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gap of the descending x = r/t that holds the barrier: m, log A and log B there."""
    n = x.shape[-1]
    prefix = torch.logcumsumexp(-x, -1)
    suffix = torch.logcumsumexp(x.flip(-1), -1).flip(-1)
    nothing = torch.full_like(x[:, :1], -torch.inf)
    log_above = torch.cat([nothing, prefix], -1)
    log_below = torch.cat([suffix, nothing], -1)
    count = torch.arange(1, n + 1, device=x.device)
    # Mass minus k when the barrier is at each score in turn.
    excess = ((log_below[:, 1:] - x).exp() - (prefix + x).exp()) / 2 + _surplus(count, k, x.dtype)
    above = (excess <= 0).sum(-1, keepdim=True)
    return _surplus(above, k, x.dtype), log_above.gather(-1, above), log_below.gather(-1, above)


def lapsum_barrier(rows: Tensor, k: float, t: float) -> Tensor:
    """Barrier b with sum_i sigma((r_i - b)/t) = k for each row, for 0 < k < n.

    >>> lapsum_barrier(torch.tensor([[0.0, 1.0]]), 1, 0.1)
    tensor([[0.5000]])
    """
    pivot, offset = _barrier(rows, k, t)
    return pivot + offset


def _barrier(rows: Tensor, k: float, t: float) -> tuple[Tensor, Tensor]:
    """A score near the barrier and the way from there: measured so, scores keep their digits."""
    ranked = rows.sort(-1, descending=True).values
    pivot = ranked[:, math.ceil(k) - 1, None]
    return pivot, t * _log_w(*_gap((ranked - pivot) / t, k))


class _LapSum(torch.autograd.Function):
    """Mask at the solved barrier; the gradient keeps the mass fixed."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, k: float, t: float) -> Tensor:
        pivot, offset = _barrier(r, k, t)
        ctx.save_for_backward(r, pivot, offset)
        ctx.t = t
        z = ((r - pivot) - offset) / t
        q = 0.5 * torch.exp(-z.abs())
        return torch.where(z > 0, 1 - q, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        r, pivot, offset = ctx.saved_tensors
        log_density = -(((r - pivot) - offset) / ctx.t).abs()
        # The softmax normalises the density even where all of it underflows.
        mean = (g * log_density.softmax(-1)).sum(-1, keepdim=True)
        return log_density.exp() / (2 * ctx.t) * (g - mean), None, None


def lapsum_sort(scores: Tensor, k: float, temperature: float = 1.0) -> Tensor:
    """Mask p = sigma((r - b)/t) of mass exactly k at a fixed temperature t.

    Args:
        scores: any shape, rows along the last dimension; differentiable.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        temperature: t > 0; the mask tends to hard top-k as t goes to zero.

    >>> p = lapsum_sort(torch.tensor([3.0, 1.0, 0.5, -1.0]), k=2, temperature=0.5)
    >>> p
    tensor([0.9944, 0.6921, 0.2987, 0.0149])
    """
    rows = rows_of(scores, k, temperature)
    mask = constant_mask(rows, k)
    if mask is None:
        mask = _LapSum.apply(rows, k, temperature)
    return mask.reshape(scores.shape).to(scores.dtype)
