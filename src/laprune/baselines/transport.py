"""Soft top-k as entropic optimal transport of the scores onto two bins.

Each score carries mass 1/n, the bin at 0 takes (n - k)/n and the bin at 1 takes k/n, and moving
score r to bin y costs (r - y)^2. The mask is n times the mass that reaches the second bin.
Masses are scaled by n and potentials divided by the regularisation throughout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laprune.baselines._common import constant_mask, rows_of

__all__ = ["sinkhorn_topk"]

ITERATIONS = 200


def _bin_potentials(f: Tensor, x: Tensor, k: float) -> tuple[Tensor, Tensor]:
    """Potentials of the bins at 0 and 1 that give them masses n - k and k."""
    return (
        math.log(x.shape[-1] - k) - torch.logsumexp(f, -1, keepdim=True),
        math.log(k) - torch.logsumexp(f + x, -1, keepdim=True),
    )


def _score_potentials(g: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """Potentials of the scores that give each of them mass one."""
    return -torch.logaddexp(g[0], g[1] + x)


def sinkhorn_topk(
    scores: Tensor, k: float, epsilon: float = 0.1, *, iterations: int = ITERATIONS
) -> Tensor:
    """Mask from two-bin entropic optimal transport, by Sinkhorn iterations in log space.

    The last iteration ends on the bins, so the mass is k after any number of them, while values
    stay within [0, 1] only at convergence. There the mask is logistic, sigmoid((2 r - c)/epsilon)
    with c set by the mass, and the gradient is that of this mask: no iteration is differentiated.

    Args:
        scores: any shape, rows along the last dimension; differentiable once.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        epsilon: entropic regularisation, positive.
        iterations: Sinkhorn iterations, at least 1.

    >>> sinkhorn_topk(torch.tensor([3.0, 1.0, 0.0, -1.0]), k=2, epsilon=1.0)
    tensor([0.9927, 0.7126, 0.2513, 0.0434])
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    rows = rows_of(scores, k, epsilon)
    mask = constant_mask(rows, k)
    if mask is None:
        # Terms of the cost common to both bins go into the scores' potentials: what is left
        # is minus the difference of the two costs, r^2 - (r - 1)^2.
        x = (2 * rows - 1) / epsilon
        with torch.no_grad():
            g = (torch.zeros_like(x[:, :1]),) * 2
            for _ in range(iterations):
                f = _score_potentials(g, x)
                g = _bin_potentials(f, x, k)
            p = torch.exp(f + x + g[1])
            q = (p * (1 - p)).clamp(min=0)
            w = q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
        # dp = q (dx - dc), and dc, the mean of dx weighted by q, keeps the mass.
        slope = q * (x - (w * x).sum(-1, keepdim=True))
        mask = p + (slope - slope.detach())
    return mask.reshape(scores.shape).to(scores.dtype)
