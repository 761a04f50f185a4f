"""The smooth top-k SVM loss: a mask-free way to train for top-k accuracy.

For scores s, label y and temperature tau, with subsets of exactly k classes,

    loss = tau log sum_{all subsets} exp((margin [y not in subset] + mean of its scores)/tau)
         - tau log sum_{subsets with y} exp((mean of its scores)/tau).

Both sums are elementary symmetric polynomials of x_j = exp(s_j/(k tau)) over the classes j != y.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["log_symmetric_polynomials", "smooth_topk_loss"]

# log 0, kept finite so that no difference of two such logarithms is NaN.
_LOG_ZERO = -1e30


def _log_product(a: Tensor, b: Tensor, degree: int) -> Tensor:
    """Logarithms of the coefficients of a product of polynomials, up to a degree."""
    size = min(a.shape[-1] + b.shape[-1] - 1, degree + 1)
    shifted = [
        functional.pad(a[..., : size - j] + b[..., j, None], (j, 0), value=_LOG_ZERO)
        for j in range(min(b.shape[-1], size))
    ]
    width = [functional.pad(x, (0, size - x.shape[-1]), value=_LOG_ZERO) for x in shifted]
    return torch.stack(width).logsumexp(0)


def log_symmetric_polynomials(log_x: Tensor, degree: int) -> Tensor:
    """Logarithms of the elementary symmetric polynomials of orders 0 to `degree` of each row.

    They are the coefficients of prod_j (1 + x_j T); pairs of factors are multiplied level by level.
    Only sums of positive terms occur, so nothing cancels, and the memory is O(n degree) a row.

    >>> log_symmetric_polynomials(torch.tensor([1.0, 2.0, 3.0]).log(), 3).exp()
    tensor([ 1.0000,  6.0000, 11.0000,  6.0000])
    """
    n = log_x.shape[-1]
    padded = functional.pad(log_x, (0, (1 << (n - 1).bit_length()) - n), value=_LOG_ZERO)
    factors = torch.stack([torch.zeros_like(padded), padded], -1)
    while factors.shape[-2] > 1:
        factors = _log_product(factors[..., ::2, :], factors[..., 1::2, :], degree)
    missing = degree + 1 - factors.shape[-1]
    return functional.pad(factors, (0, missing), value=_LOG_ZERO).squeeze(-2)


def smooth_topk_loss(
    scores: Tensor, labels: Tensor, k: int, tau: float = 1.0, *, margin: float = 1.0
) -> Tensor:
    """Smooth top-k SVM loss of each row, zero when every class is among the top k.

    Args:
        scores: `(..., classes)`, differentiable.
        labels: `(...)`, the index of the true class.
        k: how many guesses are allowed, 1 to the number of classes.
        tau: temperature; the hard top-k SVM loss is the limit at zero.
        margin: by how much the true class should beat the k-th largest other score.

    Returns:
        losses `(...)`; take their mean to train.

    >>> scores = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    >>> smooth_topk_loss(scores, torch.tensor([0, 0]), k=1)
    tensor([0.8620, 3.3490])
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the number of classes {n}, got {k}")
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    if labels.shape != scores.shape[:-1]:
        raise ValueError(f"labels must have shape {tuple(scores.shape[:-1])}, got {labels.shape}")
    x = (scores if scores.dtype == torch.float64 else scores.float()) / (k * tau)
    is_label = labels.unsqueeze(-1) == torch.arange(n, device=labels.device)
    log_e = log_symmetric_polynomials(x.masked_fill(is_label, _LOG_ZERO), k)
    own = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    excess = margin / tau + log_e[..., k] - log_e[..., k - 1] - own
    return (tau * functional.softplus(excess)).to(scores.dtype)
