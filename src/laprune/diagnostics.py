"""What a mask really is: its mass, its hardness, how binary it looks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .functional import Solution, hard_topk


class Diagnostics(NamedTuple):
    """One number per row, float64."""

    mass: Tensor
    """sum p"""
    gamma: Tensor
    """The realised hardness: C/(C+V), C = sum (p - mean p)^2, V = sum p(1-p)."""
    near_binary: Tensor
    """The fraction of entries within eps of 0 or 1."""
    overlap: Tensor
    """The share of the mass that sits on the hard top-k entries, k the rounded mass."""


def diagnostics(
    mask: Tensor | Solution, *, dim: int = -1, eps: float = 1e-3, eligible: Tensor | None = None
) -> Diagnostics:
    """Measure a mask, in float64, from its entries alone.

    >>> import laprune
    >>> p = laprune.soft_topk(torch.arange(8.0), k=2, gamma=0.9)
    >>> d = diagnostics(p)
    >>> round(d.mass.item(), 5), round(d.gamma.item(), 5), d.near_binary.item()
    (2.0, 0.9, 0.5)

    Args:
        mask: a mask, or a :class:`laprune.Solution`.
        dim: the dimension that was selected along.
        eps: an entry counts as near-binary below eps or above 1 - eps.
        eligible: the ``mask`` the operator was called with, if any: other entries are left out.
    """
    p = mask.mask if isinstance(mask, Solution) else mask
    shape, p = p.shape, p.detach().to(torch.float64).movedim(dim, -1)
    ok = (
        torch.ones_like(p)
        if eligible is None
        else eligible.expand(shape).movedim(dim, -1).to(p.dtype)
    )
    n = ok.sum(-1)
    mass = (p * ok).sum(-1)
    spread = ((p - (mass / n)[..., None]).square() * ok).sum(-1)
    softness = (p * (1 - p) * ok).sum(-1)
    binary = torch.where(p.isnan(), p, ((p < eps) | (p > 1 - eps)).to(p.dtype))
    # A row of NaN has no k: any will do, since what is made of it is NaN again.
    top = hard_topk(p, mass.round().clamp(min=1).nan_to_num(1.0))
    return Diagnostics(
        mass,
        spread / (spread + softness),
        (binary * ok).sum(-1) / n,
        (p * top).sum(-1) / mass,
    )
