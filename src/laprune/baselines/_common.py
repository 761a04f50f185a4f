"""What every baseline needs: checked arguments, rows in a working dtype, endpoint masks."""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import torch
from torch import Tensor

__all__ = [
    "around_the_cut",
    "budget_weights",
    "constant_mask",
    "import_optional",
    "rank_scores",
    "rows_of",
]

_HALF = (torch.float16, torch.bfloat16)


def rows_of(scores: Tensor, k: float, softness: float | None = None) -> Tensor:
    """Check the arguments of a baseline and return the scores as rows `(rows, n)` to compute on.

    Half-precision scores are computed in float32. Gradients flow through the reshaping.

    >>> rows_of(torch.zeros(2, 3, 4), 1).shape
    torch.Size([6, 4])
    """
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    if scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(f"scores must have a non-empty last dimension, got {tuple(scores.shape)}")
    n = scores.shape[-1]
    if not 0 <= k <= n:
        raise ValueError(f"k must be between 0 and n = {n}, got {k}")
    if softness is not None and not (softness > 0 and math.isfinite(softness)):
        raise ValueError(f"softness must be positive and finite, got {softness}")
    rows = scores.reshape(-1, n)
    return rows.float() if rows.dtype in _HALF else rows


def constant_mask(scores: Tensor, k: float) -> Tensor | None:
    """Return the only mask of mass k when there is just one (k = 0 or k = n), else `None`.

    The mask stays on the graph with a zero gradient, so `backward` works as for any other k.

    >>> constant_mask(torch.tensor([3.0, 1.0]), 2)
    tensor([1., 1.])
    """
    if 0 < k < scores.shape[-1]:
        return None
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    return scores.masked_fill(everywhere, 0.0 if k == 0 else 1.0)


def budget_weights(n: int, k: float, like: Tensor) -> Tensor:
    """Spread a budget over ranks: ones, then the fractional part of k, then zeros.

    >>> budget_weights(4, 2.5, torch.empty(0))
    tensor([1.0000, 1.0000, 0.5000, 0.0000])
    """
    return (k - torch.arange(n, device=like.device, dtype=like.dtype)).clamp(0.0, 1.0)


def rank_scores(scores: Tensor, k: int) -> Tensor:
    """Rank-k score of each row, 1 for the largest, with a trailing dimension kept.

    >>> rank_scores(torch.tensor([[3.0, 1.0, 2.0]]), 2)
    tensor([[2.]])
    """
    if scores.is_cuda:  # where kthvalue takes a hundred times longer than topk
        return torch.topk(scores, k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return torch.kthvalue(scores, scores.shape[-1] + 1 - k, dim=-1, keepdim=True).values


def around_the_cut(rows: Tensor, k: float, softness: float) -> Tensor:
    """r / softness measured from the score of rank ceil(k), cut to [-2, 2].

    The projection onto the masks of mass k is clamp(x - c, 0, 1), with c in [-1, 1] once x is
    measured so: what is cut is 0 or 1 all the same, and the rest keeps its digits wherever the
    scores lie.

    >>> around_the_cut(torch.tensor([[3e9, 1.0, 0.5]]), 2, 0.5)
    tensor([[ 2.,  0., -1.]])
    """
    pivot = rank_scores(rows.detach(), math.ceil(k))
    return ((rows - pivot) / softness).clamp(-2.0, 2.0)


_EXTRAS = {"jax": "jaxopt", "jaxopt": "jaxopt"}  # what is not in the extra `baselines`


def import_optional(package: str, operator: str) -> ModuleType:
    """Import an optional package, or say which operator needs it and how to install it.

    >>> import_optional("math", "example").pi > 3
    True
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise ImportError(
            f"the baseline {operator!r} needs the package {name!r}: "
            f"pip install 'laprune[{_EXTRAS.get(name, 'baselines')}]' (or pip install {name})"
        ) from error
