"""Projection onto masks of mass k with the `jaxopt` package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laprune.baselines._common import around_the_cut, constant_mask, import_optional, rows_of

__all__ = ["box_section"]


@functools.cache
def _projector() -> Callable[..., Any]:
    """Compiled projection of each row onto {0 <= p <= 1, sum p = k}."""
    jax = import_optional("jax", "box_section")
    projection = import_optional("jaxopt.projection", "box_section")

    def project(x: Any, k: Any) -> Any:
        ones = jax.numpy.ones_like(x)
        return projection.projection_box_section(x, (0 * ones, ones, ones, k))

    return jax.jit(jax.vmap(project, in_axes=(0, None)))


class _BoxSection(torch.autograd.Function):
    """Bridge to JAX. The gradient subtracts the mean over the fractional entries.

    That is the projection's Jacobian in closed form; recent versions of JAX cannot differentiate
    through the package's bisection under `vmap`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, k: float) -> Tensor:
        jax = import_optional("jax", "box_section")
        wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        with wide(rows.dtype == torch.float64):
            array = _projector()(jax.numpy.asarray(rows.detach().cpu().numpy()), float(k))
            mask = torch.from_numpy(np.array(array)).to(rows)
        ctx.save_for_backward(mask)
        return mask

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        active = (mask > 0) & (mask < 1)
        count = active.sum(-1, keepdim=True).clamp_min(1)
        mean = (g * active).sum(-1, keepdim=True) / count
        return torch.where(active, g - mean, 0), None


def box_section(scores: Tensor, k: float, softness: float = 1.0) -> Tensor:
    """Project r/softness onto the masks of mass k in [0, 1] with jaxopt, on the CPU.

    The same mask as `budget_sparsemax` and `sander_pav`, from another algorithm.

    Args:
        scores: any shape, rows along the last dimension; differentiable once.
        k: budget, 0 to n. `k = 0` gives zeros and `k = n` gives ones.
        softness: weight of the quadratic regularisation, positive.
    """
    import_optional("jaxopt", "box_section")
    rows = rows_of(scores, k, softness)
    mask = constant_mask(rows, k)
    if mask is None:
        mask = _BoxSection.apply(around_the_cut(rows, k, softness), k)
    return mask.reshape(scores.shape).to(scores.dtype)
